"""Segmented LRU: what was used once waits on probation, what was used again is protected.

A scan of prompts seen once flows through probation and cannot push out what is reused. The
protected segment holds at most `protected_share` of the holdings when a victim is sought; beyond
that its coldest fall back to probation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, Queue, first_evictable, split_in_place

if TYPE_CHECKING:
    from quire.tree import Holding


class SLRU:
    def __init__(self, protected_share: float = 0.8) -> None:
        self._share = protected_share
        self._probation = Queue()
        self._protected = Queue()
        self._num_queued = 0
        self._num_protected = 0

    def insert(self, holding: Holding) -> None:
        reused = holding.node.hits > 0
        self._enter(holding, self._protected if reused else self._probation)

    def touch(self, holding: Holding) -> None:
        self._leave(holding)
        self.insert(holding)

    def unpark(self, holding: Holding) -> None:
        if holding.queue is None:
            self._probation.push_cold(holding)
            self._num_queued += 1

    def split(self, lower: Holding, upper: Holding) -> None:
        split_in_place(lower, upper)
        if upper.queue is not None:
            self._num_queued += 1
            self._num_protected += upper.queue is self._protected

    def remove(self, holding: Holding) -> None:
        self._leave(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        self._demote_overflow()
        for queue in (self._probation, self._protected):
            if (holding := first_evictable(queue, self._counting(evictable))) is not None:
                return holding
        return None

    def coldest(self) -> Iterator[Holding]:
        return chain(self._probation, self._protected)

    def _counting(self, evictable: Evictable) -> Evictable:
        def check(holding: Holding) -> bool:
            if evictable(holding):
                return True
            self._num_queued -= 1  # first_evictable parks it
            self._num_protected -= holding.queue is self._protected
            return False

        return check

    def _enter(self, holding: Holding, queue: Queue) -> None:
        queue.push_hot(holding)
        self._num_queued += 1
        self._num_protected += queue is self._protected

    def _leave(self, holding: Holding) -> None:
        queue = holding.queue
        if queue is not None:
            queue.remove(holding)
            self._num_queued -= 1
            self._num_protected -= queue is self._protected

    def _demote_overflow(self) -> None:
        while self._num_protected > self._share * self._num_queued:
            coldest = self._protected.coldest()
            if coldest is None:
                return
            self._leave(coldest)
            self._enter(coldest, self._probation)
