"""First in, first out: use does not refresh.

A branch is as old as the newest page on it (what hangs below must go first anyway), so a parent
moves behind a child that is inserted under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, Queue, discard, first_evictable, split_in_place

if TYPE_CHECKING:
    from quire.tree import Holding


class FIFO:
    def __init__(self) -> None:
        self._queue = Queue()

    def insert(self, holding: Holding) -> None:
        self._queue.push_hot(holding)

    def touch(self, holding: Holding) -> None:
        self.unpark(holding)

    def unpark(self, holding: Holding) -> None:
        # It was parked at the cold end, so it is older than everything still queued.
        if holding.queue is None:
            self._queue.push_cold(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        split_in_place(lower, upper)

    def remove(self, holding: Holding) -> None:
        discard(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        return first_evictable(self._queue, evictable)

    def coldest(self) -> Iterator[Holding]:
        return iter(self._queue)
