"""Least frequently used goes first; among equals, the least recently used.

Hit counts are capped, so that finding the lowest occupied level costs at most `LEVELS` looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, Queue, discard, first_evictable, split_in_place

if TYPE_CHECKING:
    from quire.tree import Holding

LEVELS = 32


class LFU:
    def __init__(self) -> None:
        self._levels = [Queue() for _ in range(LEVELS)]

    def insert(self, holding: Holding) -> None:
        self._level(holding).push_hot(holding)

    def touch(self, holding: Holding) -> None:
        discard(holding)
        self._level(holding).push_hot(holding)

    def unpark(self, holding: Holding) -> None:
        if holding.queue is None:
            self._level(holding).push_cold(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        split_in_place(lower, upper)

    def remove(self, holding: Holding) -> None:
        discard(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        for queue in self._levels:
            if (holding := first_evictable(queue, evictable)) is not None:
                return holding
        return None

    def coldest(self) -> Iterator[Holding]:
        return chain.from_iterable(self._levels)

    def _level(self, holding: Holding) -> Queue:
        return self._levels[min(holding.node.hits, LEVELS - 1)]
