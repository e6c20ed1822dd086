"""Models of real shapes with random weights: as fast as trained ones, and their answers noise.

The weights are made where they are used, and never on a disk. The directory tells an engine all
that it asks of one: the configuration, and the header of a weight file, with no bytes behind it.
Knows dense decoders only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from quire.engine.forward.dense import DenseModel
from quire.engine.forward.dense_weights import DenseWeights, LayerWeights, Linear, expected
from quire.engine.forward.matrices import packed
from quire.engine.forward.spec import DenseSpec, dense_spec
from quire.errors import ConfigError
from quire.models import describe, read_config

STD = 0.02
SEED = 11

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
    },
    "tiny": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
    },
}
_COMMON = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def config_of(name: str, **others: Any) -> Any:
    """transformers' configuration of it, but for `others`. Raises ConfigError for a name nobody
    knows."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known: use {', '.join(SHAPES)}")
    return AutoConfig.for_model(**SHAPES[name] | _COMMON | others)


def write_outline(directory: Path, name: str) -> DenseSpec:
    """All of a model's directory but its weights. Raises ConfigError."""
    config = config_of(name)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    _write_header(directory, {})  # for a start: no shape depends on it
    spec = dense_spec(read_config(directory).get_text_config(), describe(directory))
    _write_header(directory, {name: _entry(shape) for name, shape in expected(spec)})
    return spec


def _entry(shape: tuple[int, ...]) -> dict[str, Any]:
    """As large as it would be, and ending where the file does: nobody can read it."""
    return {"dtype": "BF16", "shape": shape, "data_offsets": [-2 * math.prod(shape), 0]}


def _write_header(directory: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


class RandomModel:
    """Makes the same weights for the same spec."""

    def __init__(self, spec: DenseSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._generator = torch.Generator(device).manual_seed(SEED)
        self._dtype = dtype
        self._device = device

    def make(self) -> DenseModel:
        spec = self._spec
        embedding, head = (self._matrix(spec.vocab_size, spec.hidden_size) for _ in range(2))
        layers = tuple(self._layer() for _ in range(spec.num_layers))
        return DenseModel(spec, DenseWeights(embedding, layers, self._norm(), head))

    def _layer(self) -> LayerWeights:
        spec, hidden = self._spec, self._spec.hidden_size
        q, kv = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        heads = spec.num_q_heads + spec.num_kv_heads
        return LayerWeights(
            attention_norm=self._norm(),
            qkv=self._linear(q + 2 * kv, hidden),
            qk_norm=self._norm(heads, spec.head_dim) if spec.qk_norm else None,
            o=self._linear(hidden, q),
            attention_post_norm=None,
            mlp_norm=self._norm(),
            gate_up=self._linear(2 * spec.mlp_size, hidden),
            down=self._linear(hidden, spec.mlp_size),
            mlp_post_norm=None,
        )

    def _linear(self, rows: int, columns: int) -> Linear:
        return Linear(packed(self._matrix(rows, columns)), None)

    def _norm(self, *shape: int) -> torch.Tensor:
        return self._matrix(*(shape or (self._spec.hidden_size,))).add_(1)

    def _matrix(self, *shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(0, STD, generator=self._generator)
