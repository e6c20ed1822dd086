"""Segmented LRU: what was used once waits on probation, what was used again is protected.

A scan of prompts seen once flows through probation and cannot push out what is reused. The
protected segment holds at most `protected_share` of the holdings when a victim is sought; beyond
that its coldest fall back to probation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, EvictionPolicy, EvictionQueue

if TYPE_CHECKING:
    from quire.tree import Holding


class SLRU(EvictionPolicy):
    def __init__(self, protected_share: float = 0.8) -> None:
        super().__init__(2)
        self._probation, self._protected = self._queues
        self._share = protected_share
        self._num_queued = 0
        self._num_protected = 0

    def queue_for(self, holding: Holding) -> EvictionQueue:
        return self._protected if holding.node.hits > 0 else self._probation

    def insert(self, holding: Holding) -> None:
        super().insert(holding)
        self._count(holding.queue, 1)

    def unpark(self, holding: Holding) -> None:
        if holding.queue is None:
            self._probation.push_cold(holding)
            self._count(self._probation, 1)

    def split(self, lower: Holding, upper: Holding) -> None:
        super().split(lower, upper)
        self._count(upper.queue, 1)

    def remove(self, holding: Holding) -> None:
        self._count(holding.queue, -1)
        super().remove(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        self._demote_overflow()
        return super().victim(evictable)

    def _count(self, queue: EvictionQueue | None, change: int) -> None:
        if queue is not None:
            self._num_queued += change
            self._num_protected += change * (queue is self._protected)

    def _demote_overflow(self) -> None:
        while self._num_protected > self._share * self._num_queued:
            coldest = self._protected.coldest()
            if coldest is None:
                return
            self.remove(coldest)
            self._probation.push_hot(coldest)
            self._count(self._probation, 1)
