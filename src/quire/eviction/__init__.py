"""Eviction policies by name."""

from __future__ import annotations

import enum
from collections.abc import Callable

from quire.eviction.base import Evictable, EvictionPolicy, EvictionQueue
from quire.eviction.fifo import FIFO
from quire.eviction.lfu import LFU
from quire.eviction.lru import LRU
from quire.eviction.priority import MAX_PRIORITY, Priority
from quire.eviction.retained import GO_FIRST, MAX_LEVEL, Retained, Retention
from quire.eviction.slru import SLRU

__all__ = [
    "GO_FIRST",
    "MAX_LEVEL",
    "MAX_PRIORITY",
    "Evictable",
    "EvictionKind",
    "EvictionPolicy",
    "EvictionQueue",
    "Retained",
    "Retention",
    "make_policy",
]


class EvictionKind(enum.Enum):
    LRU = "lru"
    LFU = "lfu"
    SLRU = "slru"
    FIFO = "fifo"
    PRIORITY = "priority"


_PLAIN: dict[EvictionKind, Callable[[], EvictionPolicy]] = {
    EvictionKind.LRU: LRU,
    EvictionKind.LFU: LFU,
    EvictionKind.SLRU: SLRU,
    EvictionKind.FIFO: FIFO,
}


def make_policy(
    kind: EvictionKind, clock: Callable[[], float], retention_decay_s: float = 60.0
) -> EvictionPolicy:
    if kind is EvictionKind.PRIORITY:
        return Priority(clock, retention_decay_s)
    return _PLAIN[kind]()
