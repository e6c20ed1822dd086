"""Which models the engine can serve, and in one sentence why not the others.

Knows transformers' configurations; loads no weights. The engine keeps keys and values of every
layer for every token, as they are after the position was worked in, and runs attention itself
through transformers' attention interface. A model that needs more, or other, state per token is
refused here rather than served wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FULL = "full_attention"

# Their frequencies depend on how long the sequence has become, so a key computed early differs
# from the same key computed late, and a cached one from either.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_supported(config: PretrainedConfig) -> None:
    """Raises ModelError with the reason if the engine cannot serve such a model."""
    if reason := _unsupported(config, config.get_text_config()):
        raise ModelError(f"models of type {config.model_type} cannot be served yet: {reason}")


def _unsupported(config: Any, text: Any) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        return "it has an encoder; only decoders are served"
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    named = config.architectures or []
    decodes = getattr(config, "is_decoder", True)  # encoders that could be told to decode have it
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and decodes
    if not known or (named and not classes & set(named)):
        return "it is not a decoder that predicts the next token (a causal language model)"
    if any(getattr(config, f"{other}_config", None) for other in ("vision", "audio")):
        return "it takes more than text"
    # Not all hybrids list their layers; transformers marks the classes that carry a state.
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful:
        return "it has recurrent layers"
    return _layers(text) or _attention(text, model_class)


def _layers(text: Any) -> str | None:
    kinds = getattr(text, "layer_types", None)
    if others := sorted(set(kinds or ()) - {_FULL}):
        return f"it has layers of other kinds than {_FULL}: {', '.join(others)}"
    window = getattr(text, "sliding_window", None)
    used = getattr(text, "use_sliding_window", True) and not kinds
    if window and used and window < text.max_position_embeddings:
        return f"its attention sees a sliding window of {window} tokens"
    return None


def _attention(text: Any, model_class: Any) -> str | None:
    if not model_class._supports_attention_backend:
        return "transformers' implementation of it does not let the engine run its attention"
    if getattr(text, "kv_lora_rank", None):
        return "it keeps compressed keys and values (latent attention)"
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None))
    if any(isinstance(count, list | tuple) for count in heads):
        return "its layers have different numbers of heads"
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if _is_dict(r))}
    if wrong := sorted(kinds & _LENGTH_DEPENDENT_ROPE):
        return f"its {wrong[0]} position embedding depends on the length of the whole sequence"
    return None


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)
