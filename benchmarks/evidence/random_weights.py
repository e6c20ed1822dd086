"""Random weights of a real shape as files, for servers and engines in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from quire.bench.gpu.random_model import SEED, STD, config_of
from quire.progress import Count

_PER_FILE = 24
"""Tensors: about two layers."""


def write_model(
    directory: Path,
    name: str,
    *,
    device: torch.device,
    layers: int | None = None,
    progress: Count = lambda done, of: None,
) -> None:
    """As transformers saves one, in bfloat16; with other `layers` than it has, if said. Raises
    ConfigError for a name nobody knows."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = config_of(name, **({} if layers is None else {"num_hidden_layers": layers}))
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
