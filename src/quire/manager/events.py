"""Cache events: which pages appeared in or left a tier, in order, in a bounded buffer."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass


class EventKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    kind: EventKind
    tier: str
    """device, host or store"""
    component: str
    keys: bytes
    """Page keys, concatenated, in path order."""
    parent: bytes = b""
    """STORED, if tokens are wanted: key of the page before them; empty: they are the first."""
    tokens: bytes = b""
    """STORED, if they are wanted: of those pages, 32 bits each."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    events: list[CacheEvent]
    lost: int
    """Events dropped before these because nobody took them in time: resynchronise."""


class EventBuffer:
    """Keeps the newest `capacity` events; the oldest are dropped and counted."""

    def __init__(self, capacity: int) -> None:
        self.enabled = capacity > 0
        self._events: deque[CacheEvent] = deque(maxlen=capacity)
        self._lost = 0

    def add(self, event: CacheEvent) -> None:
        if len(self._events) == self._events.maxlen:
            self._lost += 1
        self._events.append(event)

    def take(self) -> EventBatch:
        batch = EventBatch(list(self._events), self._lost)
        self._events.clear()
        self._lost = 0
        return batch
