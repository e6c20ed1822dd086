"""Priority with soft retention: lower priority goes first, and an unused priority decays.

A request may ask that its prefix be kept (priority 1..MAX_PRIORITY). Each `decay_s` without use
lowers a holding by one level, so that retention is a preference and never a leak: whatever was
asked for, an unused prefix ends as an ordinary one. Within a level the least recently used goes
first. Each level is ordered by the time its holdings entered it, so expiry only looks at cold
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, Queue, discard, first_evictable, split_in_place

if TYPE_CHECKING:
    from quire.tree import Holding

MAX_PRIORITY = 15


class Priority:
    def __init__(self, clock: Callable[[], float], decay_s: float = 60.0) -> None:
        self._clock = clock
        self._decay_s = decay_s
        self._levels = [Queue() for _ in range(MAX_PRIORITY + 1)]

    def insert(self, holding: Holding) -> None:
        node = holding.node
        node.stamp = self._clock()
        self._levels[min(node.priority, MAX_PRIORITY)].push_hot(holding)

    def touch(self, holding: Holding) -> None:
        discard(holding)
        self.insert(holding)

    def unpark(self, holding: Holding) -> None:
        if holding.queue is None:
            node = holding.node
            idle_levels = int((self._clock() - node.stamp) / self._decay_s)
            level = max(0, min(node.priority, MAX_PRIORITY) - idle_levels)
            self._levels[level].push_cold(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        split_in_place(lower, upper)

    def remove(self, holding: Holding) -> None:
        discard(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        self._decay()
        for queue in self._levels:
            if (holding := first_evictable(queue, evictable)) is not None:
                return holding
        return None

    def coldest(self) -> Iterator[Holding]:
        return chain.from_iterable(self._levels)

    def _decay(self) -> None:
        now = self._clock()
        for level in range(MAX_PRIORITY, 0, -1):
            queue, below = self._levels[level], self._levels[level - 1]
            while (holding := queue.coldest()) is not None:
                node = holding.node
                # Levels fallen so far times decay_s is how long it has been idle already.
                fallen = max(0, min(node.priority, MAX_PRIORITY) - level)
                if now - node.stamp < (fallen + 1) * self._decay_s:
                    break
                queue.remove(holding)
                below.push_hot(holding)
