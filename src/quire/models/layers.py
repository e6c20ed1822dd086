"""What each layer of a model keeps: keys and values of all tokens, of a window, or a state.

Knows the names that transformers' configurations give to layers; neither weights nor memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

FULL, WINDOW, HYBRID = "full_attention", "sliding_attention", "hybrid"
_RECURRENT = {"linear_attention", "conv"}
_STATELESS = {"mlp", "moe"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Numbers of the layers of each kind. One may be full and recurrent at once, or nothing."""

    full: tuple[int, ...]
    window: tuple[int, ...]
    window_tokens: int
    """A query sees itself and so many tokens less one before it; 0: there are no such layers."""
    recurrent: tuple[int, ...]
    unknown: tuple[str, ...]
    """Kinds that are none of these, sorted."""


def layers_of(text: Any) -> Layers:
    """`text`: a configuration, of the text part if there are several."""
    tokens = getattr(text, "sliding_window", None) or 0
    if tokens >= getattr(text, "max_position_embeddings", math.inf):
        tokens = 0  # a window over everything hides nothing
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = [WINDOW if _always_slides(text) else FULL] * text.num_hidden_layers
    kinds = [FULL if kind == WINDOW and not tokens else kind for kind in kinds]
    window = _where(kinds, {WINDOW})
    known = {FULL, WINDOW, HYBRID} | _RECURRENT | _STATELESS
    return Layers(
        full=_where(kinds, {FULL, HYBRID}),
        window=window,
        window_tokens=tokens if window else 0,
        recurrent=_where(kinds, _RECURRENT | {HYBRID}),
        unknown=tuple(sorted(set(kinds) - known)),
    )


def _always_slides(text: Any) -> bool:
    """Without a list of layers, a window is for all of them, unless a switch that this kind of
    model really has says no; a stray entry in config.json does not count."""
    has_switch = hasattr(type(text), "use_sliding_window")
    return bool(text.use_sliding_window) if has_switch else True


def _where(kinds: list[str], wanted: set[str]) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(kinds) if kind in wanted)
