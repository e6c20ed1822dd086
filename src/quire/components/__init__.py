"""The kinds of state a page can need: full attention, sliding windows, recurrent snapshots."""

from collections.abc import Sequence

from quire.components.base import Component, Guard, PoolSize, usable_pages
from quire.components.full import FullAttention
from quire.components.recurrent import Recurrent
from quire.components.window import SlidingWindow

__all__ = [
    "Component",
    "FullAttention",
    "Guard",
    "PoolSize",
    "Recurrent",
    "SlidingWindow",
    "recurrent_of",
    "usable_pages",
    "window_of",
]


def window_of(components: Sequence[Component]) -> SlidingWindow | None:
    return next((c for c in components if isinstance(c, SlidingWindow)), None)


def recurrent_of(components: Sequence[Component]) -> Recurrent | None:
    return next((c for c in components if isinstance(c, Recurrent)), None)
