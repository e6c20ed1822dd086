"""Tiny random models of the hybrid kinds, whose answers really depend on what came before.

`TINY[name](directory)` writes one as transformers saves it: float32, a vocabulary of 256, windows
of 24 tokens. The weights are wide enough that greedy tokens vary and that a lost state or a window
off by one changes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 256
WINDOW = 24
_STD = 0.2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FALCON_H1: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

_NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "intermediate_size": 96,
    "head_dim": 16,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}

_QWEN3_NEXT: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

_GRANITE_MOE_HYBRID: dict[str, Any] = {
    "intermediate_size": 32,
    "shared_intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "num_local_experts": 4,
    "attention_multiplier": 0.25,
    "position_embedding_type": "rope",
}

_LFM2: dict[str, Any] = {
    "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}

_GEMMA3: dict[str, Any] = {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_GPT_OSS: dict[str, Any] = {
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def _writer(kind: str, own: dict[str, Any], config_kind: str = "") -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        config = getattr(transformers, f"{config_kind or kind}Config")(**_COMMON | own)
        torch.manual_seed(7)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        _widen(model)
        model.save_pretrained(directory)
        return directory

    return write


@torch.no_grad()
def _widen(model: torch.nn.Module) -> None:
    """Norms, and the decays that a model begins with, stay; all that is projected is made wide."""
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf in ("A_log", "D"):
            continue
        if leaf == "dt_bias":
            parameter.uniform_(-3.0, 0.0)  # from a long memory to a short one
        elif leaf == "sinks":
            parameter.uniform_(-1.0, 2.0)
        elif parameter.dim() > 1:
            parameter.normal_(std=_STD)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    # Gemma multiplies what it looks up; so much of it would drown what came before.
    embedding.weight /= getattr(embedding, "scalar_embed_scale", 1.0)


PLAIN = {"llama": _writer("Llama", {"intermediate_size": 96, "num_hidden_layers": 2})}
"""With full attention only, beside them."""

TINY: dict[str, Callable[[Path], Path]] = {
    "falcon_h1": _writer("FalconH1", _FALCON_H1),
    "nemotron_h": _writer("NemotronH", _NEMOTRON_H),
    "qwen3_next": _writer("Qwen3Next", _QWEN3_NEXT),
    "granite_moe_hybrid": _writer("GraniteMoeHybrid", _GRANITE_MOE_HYBRID),
    "lfm2": _writer("Lfm2", _LFM2),
    "gemma3": _writer("Gemma3", _GEMMA3, "Gemma3Text"),
    "gpt_oss": _writer("GptOss", _GPT_OSS),
}
