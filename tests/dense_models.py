"""Tiny random models of the dense families, each with something the others do not have.

`DENSE[name](directory)` writes one as transformers saves it: float32, a vocabulary of 256. Every
weight is random, norms and biases too, so that nothing that is left out goes unseen. Heads are not
hidden / heads wide, and several query heads share each key head.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 256
WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
}


def writer(kind: str, config_kind: str = "", **own: Any) -> Callable[[Path], Path]:
    def write(directory: Path, **more: Any) -> Path:
        config = getattr(transformers, f"{config_kind or kind}Config")(**_COMMON | own | more)
        torch.manual_seed(7)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        _randomise(model)
        model.save_pretrained(directory, max_shard_size="100KB")  # several files
        return directory

    return write


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.2)
        else:
            parameter.add_(0.3 * torch.randn(parameter.shape))
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    # Gemma multiplies what it looks up; so much of it would drown what came before.
    embedding.weight /= getattr(embedding, "scalar_embed_scale", 1.0)


DENSE: dict[str, Callable[..., Path]] = {
    "llama": writer("Llama", rope_parameters=_LLAMA3),
    "llama_biases": writer(
        "Llama",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    ),
    "mistral": writer("Mistral", sliding_window=None, rope_parameters=_YARN),
    "qwen2": writer("Qwen2", tie_word_embeddings=True),
    "qwen2_windows": writer("Qwen2", **_WINDOWS),
    "qwen3": writer("Qwen3", tie_word_embeddings=True),
    "qwen3_biases": writer("Qwen3", attention_bias=True, hidden_act="gelu", **_WINDOWS),
    "gemma3": writer(
        "Gemma3",
        "Gemma3Text",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=20,
        final_logit_softcapping=3.0,
        rope_parameters=_GEMMA_ROPES,
        tie_word_embeddings=True,
    ),
}
