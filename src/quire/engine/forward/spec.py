"""DenseSpec: all that a configuration decides about a dense decoder, for the families known here.

    x ─▶ norm ─▶ q,k,v (+ bias) ─▶ [norm of q and k] ─▶ positions ─▶ attention ─▶ o ─▶ [norm] ─▶ + x
      ─▶ norm ─▶ down( act(gate) · up ) ─▶ [norm] ─▶ + x

Families differ in what is in brackets, in biases, scales and windows. Knows transformers'
configurations and the names of their weights; loads nothing. What is not known to be computed
exactly as transformers does is refused with a reason, and left to transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.engine.forward.rope import Rope, refusal, rope_of
from quire.models import ModelShape

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class DenseSpec:
    num_layers: int
    hidden_size: int
    mlp_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    activation: str
    norm_eps: float
    scaling: float
    """Of attention scores."""
    ropes: tuple[Rope, ...]
    """Of each layer; those that are alike are one object."""
    windows: tuple[int | None, ...]
    """Of each layer; None: it sees everything."""
    is_tied: bool
    """The output head is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Attention's and the MLP's outputs are normed before they are added."""
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    embedding_scale: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    traits: Callable[[Any], dict[str, Any]]
    """Fields of a DenseSpec that are not the same for all families."""
    has_windows: bool = False
    """By layer, as `layer_types` says."""
    has_ropes: bool = False
    """One for each kind of layer."""


def dense_refusal(text: Any, shape: ModelShape) -> str | None:
    """Why our own decoder cannot compute such a model; None: it can."""
    family = _FAMILIES.get(text.model_type)
    if family is None:
        return f"models of type {text.model_type} are not dense decoders that it knows"
    if getattr(text, "quantization_config", None) is not None:
        return "its weights are quantised"
    if shape.window_layers and not family.has_windows:
        return f"its configuration has windows, which models of type {text.model_type} have not"
    activation = _traits(text, shape)["activation"]
    if activation not in _ACTIVATIONS:
        return f"its activation is {activation}"
    reasons = (refusal(text, kind) for kind in _rope_kinds(text))
    return next((reason for reason in reasons if reason), None)


def dense_spec(text: Any, shape: ModelShape) -> DenseSpec:
    """Of a configuration that `dense_refusal` has nothing against."""
    kinds = _rope_kinds(text)
    ropes = {kind: rope_of(text, shape.head_dim, kind) for kind in set(kinds)}
    windows = set(shape.window_layers)
    return DenseSpec(
        num_layers=shape.num_layers,
        hidden_size=text.hidden_size,
        mlp_size=text.intermediate_size,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        norm_eps=text.rms_norm_eps,
        ropes=tuple(ropes[kind] for kind in kinds),
        windows=tuple(shape.window if i in windows else None for i in range(shape.num_layers)),
        is_tied=bool(text.tie_word_embeddings),
        **_traits(text, shape),
    )


def _traits(text: Any, shape: ModelShape) -> dict[str, Any]:
    usual = {"activation": getattr(text, "hidden_act", None), "scaling": shape.head_dim**-0.5}
    return usual | _FAMILIES[text.model_type].traits(text)


def _rope_kinds(text: Any) -> list[str | None]:
    """Which positions each layer has, by its kind; None: those that all layers have."""
    if _FAMILIES[text.model_type].has_ropes:
        return list(text.layer_types)
    return [None] * int(text.num_hidden_layers)


def _llama(text: Any) -> dict[str, Any]:
    bias = bool(text.attention_bias)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(text.mlp_bias)}


def _mistral(text: Any) -> dict[str, Any]:
    return {}


def _qwen2(text: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(text: Any) -> dict[str, Any]:
    bias = bool(text.attention_bias)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma3(text: Any) -> dict[str, Any]:
    return _qwen3(text) | {
        "activation": text.hidden_activation,
        "scaling": text.query_pre_attn_scalar**-0.5,
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": text.hidden_size**0.5,
        "logit_cap": text.final_logit_softcapping,
    }


_FAMILIES = {
    "gemma3_text": _Family(_gemma3, has_windows=True, has_ropes=True),
    "llama": _Family(_llama),
    "mistral": _Family(_mistral),
    "qwen2": _Family(_qwen2, has_windows=True),
    "qwen3": _Family(_qwen3, has_windows=True),
}
