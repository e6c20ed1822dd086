"""Which models the engine can serve, and in one sentence why not the others.

Knows transformers' configurations; loads no weights. The engine keeps keys and values of attention
layers, as they are after the position was worked in, for every token or for those in a window, and
the states of recurrent layers. It runs attention itself through transformers' attention interface.
A model that needs more, or other, state is refused here rather than served wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import ModelError
from quire.models import recurrence
from quire.models.layers import FULL, Layers, layers_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Mamba's configurations say nothing of positions; transformers marks classes with a state.
    if model_class._is_stateful and (reason := recurrence.refusal(text)):
        return reason
    layers = layers_of(text)
    return _layers(text, layers) or _attention(text, model_class, layers)


def _layers(text: Any, layers: Layers) -> str | None:
    if layers.unknown:
        return f"it has layers of other kinds than are known here: {', '.join(layers.unknown)}"
    if layers.recurrent and (reason := recurrence.refusal(text)):
        return reason
    if not layers.full:
        seen = f"a sliding window of {layers.window_tokens} tokens" if layers.window else "a state"
        return f"it has no layer of {FULL}: all that its layers see is {seen}"
    return None


def _attention(text: Any, model_class: Any, layers: Layers) -> str | None:
    # Not set for some hybrids, which use the attention interface all the same.
    if not (model_class._supports_attention_backend or layers.recurrent):
        return "transformers' implementation of it does not let the engine run its attention"
    if getattr(text, "kv_lora_rank", None):
        return "it keeps compressed keys and values (latent attention)"
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None))
    if any(isinstance(count, list | tuple) for count in heads):
        return "its layers have different numbers of heads"
    if reason := _options(text):
        return reason
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(r.get("rope_type") for r in rope.values() if _is_dict(r))}
    if wrong := sorted(kinds & _LENGTH_DEPENDENT_ROPE):
        return f"its {wrong[0]} position embedding depends on the length of the whole sequence"
    return None


def _options(text: Any) -> str | None:
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps the scores of its attention (softcapping)"
    if getattr(text, "use_bidirectional_attention", None) or not getattr(text, "is_causal", True):
        return "its attention looks ahead"
    if getattr(text, "num_kv_shared_layers", None):
        return "some of its layers use the keys and values of others"
    for name in ("global_head_dim", "swa_head_dim", "v_head_dim"):
        if getattr(text, name, None) not in (None, getattr(text, "head_dim", None)):
            return f"its heads are not all of one size ({name})"
    return None


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)
