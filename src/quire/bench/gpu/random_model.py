"""Models of real shapes with random weights: as fast as trained ones, and their answers noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError

STD = 0.02
SEED = 11
_PER_FILE = 24
"""Tensors: about two layers."""

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


def config_of(name: str, layers: int | None = None) -> Any:
    """transformers' configuration of it, with other `layers` than it has, if said. Raises
    ConfigError for a name nobody knows."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ConfigError(f"shape {name!r} is not known: use {', '.join(SHAPES)}")
    options = SHAPES[name] | _COMMON
    if layers is not None:
        options = options | {"num_hidden_layers": layers}
    return AutoConfig.for_model(**options)


def write_model(
    directory: Path,
    name: str,
    *,
    device: torch.device,
    layers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """As transformers saves one, in bfloat16; with other `layers` than it has, if said. Raises
    ConfigError for a name nobody knows."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = config_of(name, layers)
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()  # type: ignore[no-untyped-call]
    generator = torch.Generator(device).manual_seed(SEED)
    places: dict[str, str] = {}
    tensors = [(tensor, value.shape) for tensor, value in shapes.items()]
    for first in range(0, len(tensors), _PER_FILE):
        file = f"model-{first:05d}.safetensors"
        made = {}
        for tensor, shape in tensors[first : first + _PER_FILE]:
            value = torch.randn(shape, generator=generator, device=device).mul_(STD)
            made[tensor] = (value + 1 if "norm" in tensor else value).bfloat16().cpu()
            places[tensor] = file
        save_file(made, directory / file, metadata={"format": "pt"})
        progress(min(first + _PER_FILE, len(tensors)), len(tensors))
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
