"""Least recently used goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from quire.tree import Holding


class LRU(EvictionPolicy):
    def __init__(self) -> None:
        super().__init__(1)
        self._queue = self._queues[0]

    # As it is inherited, but faster: every request does these several times.

    def insert(self, holding: Holding) -> None:
        self._queue.push_hot(holding)

    def touch(self, holding: Holding) -> None:
        queue, before, after = self._queue, holding._prev, holding._next
        if before is not None and after is not None:  # else it is parked
            before._next = after
            after._prev = before
        last = queue._prev
        holding._prev, holding._next, holding.queue = last, queue, queue
        last._next = queue._prev = holding
