"""Least recently used goes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, Queue, first_evictable, split_in_place

if TYPE_CHECKING:
    from quire.tree import Holding


class LRU:
    def __init__(self) -> None:
        self._queue = Queue()

    def insert(self, holding: Holding) -> None:
        self._queue.push_hot(holding)

    def touch(self, holding: Holding) -> None:
        if holding.queue is None:
            self._queue.push_hot(holding)
        else:
            self._queue.move_hot(holding)

    def unpark(self, holding: Holding) -> None:
        if holding.queue is None:
            self._queue.push_cold(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        split_in_place(lower, upper)

    def remove(self, holding: Holding) -> None:
        if holding.queue is not None:
            holding.queue.remove(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        return first_evictable(self._queue, evictable)

    def coldest(self) -> Iterator[Holding]:
        return iter(self._queue)
