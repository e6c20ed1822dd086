"""Priority with soft retention: lower priority goes first, and an unused priority decays.

A request may ask that its prefix be kept (priority 1..MAX_PRIORITY). Each `decay_s` without use
lowers a holding by one level, so that retention is a preference and never a leak: whatever was
asked for, an unused prefix ends as an ordinary one. Within a level the least recently used goes
first. Each level is ordered by the time its holdings entered it, so expiry only looks at cold
ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, EvictionPolicy, EvictionQueue

if TYPE_CHECKING:
    from quire.tree import Holding

MAX_PRIORITY = 15


class Priority(EvictionPolicy):
    def __init__(self, clock: Callable[[], float], decay_s: float = 60.0) -> None:
        super().__init__(MAX_PRIORITY + 1)
        self._clock = clock
        self._decay_s = decay_s

    def queue_for(self, holding: Holding) -> EvictionQueue:
        node = holding.node
        idle_levels = int((self._clock() - node.stamp) / self._decay_s)
        return self._queues[max(0, min(node.priority, MAX_PRIORITY) - idle_levels)]

    def insert(self, holding: Holding) -> None:
        holding.node.stamp = self._clock()
        super().insert(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        self._decay()
        return super().victim(evictable)

    def _decay(self) -> None:
        now = self._clock()
        for level in range(MAX_PRIORITY, 0, -1):
            queue, below = self._queues[level], self._queues[level - 1]
            while (holding := queue.coldest()) is not None:
                node = holding.node
                # Levels fallen so far times decay_s is how long it has been idle already.
                fallen = max(0, min(node.priority, MAX_PRIORITY) - level)
                if now - node.stamp < (fallen + 1) * self._decay_s:
                    break
                queue.remove(holding)
                below.push_hot(holding)
