"""A model with recurrent layers, of random weights: its speed is a trained one's, its answers are
noise that depends on all of the prompt.

The shape of Qwen3-Next made small: three layers of gated delta nets to one of attention, heads of
128, no experts. Of the kinds that the engine serves it is the one that transformers computes
without kernels of its own in seconds; for those of Mamba 2 it takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "random Qwen3-Next"

SHAPE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 0,
    "max_position_embeddings": 32768,
}

_SEED = 7
_STD = 0.05
_DT_BIAS = (-6.0, -1.0)
"""From states that forget within hundreds of tokens to such that do within a few."""


def write_model(directory: Path, shape: dict[str, Any] | None = None) -> None:
    """As transformers saves one, in float32. `shape`: to take the place of parts of SHAPE."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.utils import logging

    options = SHAPE | (shape or {})
    layers = range(options["num_hidden_layers"])
    config = Qwen3NextConfig(**options, mlp_only_layers=list(layers), initializer_range=_STD)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        model = Qwen3NextForCausalLM(config)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.uniform_(*_DT_BIAS)
    # What is shown of the progress is the benchmark's business.
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(directory)
    finally:
        if has_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
