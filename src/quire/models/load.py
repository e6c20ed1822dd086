"""From what a user calls a model to a directory, its shape, its tokenizer and its weights.

Nothing here reaches for the network, except that the embedded default is fetched at first use
when it is not installed, and what is named by a hub's id (download.py).
"""

from __future__ import annotations

import contextlib
import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models.download import from_hub, is_hub_id
from quire.models.embedded import embedded_dir, embedded_model
from quire.models.gguf import convert_gguf, converted_dir, file_digest
from quire.models.layers import layers_of
from quire.models.recurrence import StateLayout, StateShape, state_shape
from quire.models.support import check_supported
from quire.models.weights import weight_files, weight_totals
from quire.progress import Share

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_GENERAL_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the engine must know of a model before it loads it."""

    architecture: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    num_parameters: int
    weight_bytes: int
    """As they are in the files; times another dtype's size, num_parameters gives the rest."""
    full_layers: tuple[int, ...]
    """Layers that keep keys and values of every token."""
    window_layers: tuple[int, ...] = ()
    """Layers that need those of the last `window` tokens only, the query's own included."""
    window: int = 0
    recurrent_layers: tuple[int, ...] = ()
    """Layers with a state of fixed size. Some models have attention in the same ones."""
    state: StateShape | None = None

    def state_layout(self, dtype: str) -> StateLayout:
        """Of one recurrent layer's state of one sequence, for a model run in `dtype`."""
        assert self.state is not None, "the model has no recurrent layers"
        return self.state.layout(dtype)

    def state_bytes(self, dtype: str) -> int:
        """Its size; 0 if there are no recurrent layers."""
        return self.state_layout(dtype).size_bytes if self.state is not None else 0


def resolve(
    model: str | None, progress: Share | None = None, cache_dir: Path | None = None
) -> Path:
    """The directory of safetensors behind what a user wrote: nothing (the embedded default), a
    directory, a .gguf file, a directory with one, or a model's id on the hub. Raises ModelError in
    one sentence."""
    if model is None:
        return embedded_model(cache_dir, progress)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is a file: give the model's directory, or a .gguf file")
        return convert_gguf(path, cache_dir, progress)
    if not path.is_dir():
        if not is_hub_id(model):
            raise ModelError(
                f"{model} does not exist: give the path of a local directory or .gguf file"
            )
        path = from_hub(model, progress)
    packed = sorted(path.glob("*.gguf"))
    if packed and next(path.glob("*.safetensors"), None) is None:
        if len(packed) > 1:
            raise ModelError(f"{path} holds {len(packed)} .gguf files: give the path of one")
        return convert_gguf(packed[0], cache_dir, progress)
    weight_files(path)
    return path


def conversion(model: str | None) -> Path | None:
    """Where `resolve` keeps, or will keep, what it makes of `model`; None: it is used as it is, or
    cannot be. Of a file that was never converted only the folder is known: it is not read for that.
    Raises ModelError."""
    if model is None:
        return embedded_dir()
    path = Path(model).expanduser()
    packed = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if len(packed) != 1 or packed[0].suffix.lower() != ".gguf":
        return None
    if path.is_dir() and next(path.glob("*.safetensors"), None) is not None:
        return None
    found = converted_dir(packed[0].stem, "")
    if next(found.parent.glob(f"{glob.escape(found.name)}*"), None) is None:
        return found.parent
    return converted_dir(packed[0].stem, file_digest(packed[0]))


def read_config(directory: Path) -> PretrainedConfig:
    """Raises ModelError if the directory is not a model that can be served."""
    from transformers import AutoConfig

    with _quiet(), _model_errors(directory):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    check_supported(config)
    return config


def describe(directory: Path) -> ModelShape:
    """Raises ModelError if the directory is not a model that can be served."""
    config = read_config(directory)
    text: Any = config.get_text_config()
    totals = weight_totals(directory)
    q_heads = text.num_attention_heads
    layers = layers_of(text)
    return ModelShape(
        architecture=(config.architectures or [config.model_type])[0],
        num_layers=text.num_hidden_layers,
        num_q_heads=q_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or q_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // q_heads,
        vocab_size=text.vocab_size,
        max_position_embeddings=text.max_position_embeddings,
        num_parameters=totals.num_parameters,
        weight_bytes=totals.size_bytes,
        full_layers=layers.full,
        window_layers=layers.window,
        window=layers.window_tokens,
        recurrent_layers=layers.recurrent,
        state=state_shape(text) if layers.recurrent else None,
    )


def load_model(
    directory: Path, *, dtype: torch.dtype, device: torch.device, attention: str
) -> PreTrainedModel:
    """The model with its weights, ready to run forward; `attention` names a function registered
    with transformers' attention interface. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    config = read_config(directory)
    weight_totals(directory)  # finds a file that was cut short, and says which
    load: Any = AutoModelForCausalLM.from_pretrained  # its types do not know the second result
    with _quiet(), _model_errors(directory):
        model, info = load(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            # On an accelerator weights go there one by one, without a whole copy on the host.
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below, with the name
        )
    # transformers would fill what is missing with random numbers.
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise ModelError(
            f"{directory} does not have all weights of the model, such as {missing[0]}, in the "
            "shape that config.json says: get the model again"
        )
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Raises ModelError. Loads no torch for tokenizers that say they are of the general class."""
    with _quiet(), _model_errors(directory):
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(directory).from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return tokenizer


def _tokenizer_class(directory: Path) -> Any:
    """transformers looks a special class up through the model's code, which imports torch."""
    settings = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").exists() and settings.exists():
        name = json.loads(settings.read_text()).get("tokenizer_class")
        if name in _GENERAL_TOKENIZERS:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@contextlib.contextmanager
def _model_errors(directory: Path) -> Iterator[None]:
    """transformers raises whatever it meets; to a user all of it is the model's fault."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a boundary: a library of many authors, and a user's files
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{directory} cannot be loaded: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no warnings of transformers', which it gives by process-wide settings."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
