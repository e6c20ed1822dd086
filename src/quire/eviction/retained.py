"""Retained: what one tier was asked to keep, and for how long. Soft: an order, never a lock.

The rule, in two sentences. A page that is retained goes after every page of its tier that is not,
until its time is over since it was last asked for; then it goes before them, or as any other if
the other tier is still to keep it. And what is retained is never more than a share of the tier:
beyond that those used longest ago are pages as any other.

    goes first                                                        goes last
    time is over, or "go first" │ ordinary pages, by the policy │ level 1 │ level 2

Knows holdings and time. Which pages somebody asks for is the manager's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from quire.eviction.base import Evictable, EvictionPolicy, EvictionQueue

if TYPE_CHECKING:
    from quire.tree import Holding

GO_FIRST, ORDINARY, MAX_LEVEL = -1, 0, 2
_STALE_DEADLINES = 64
_PAGE_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Retention:
    """What was asked for a node."""

    level: int = ORDINARY
    until_s: float = 0.0
    """Somewhere."""
    tiers: tuple[float | None, float | None] = (None, None)
    """Until when on the device, and on the host; None: nobody asked it of that tier."""
    stored: bool = True
    """May the store have it?"""

    @classmethod
    def of(cls, level: int, until_s: float, tiers: tuple[bool, bool]) -> Retention:
        """What one request asks for, in these `tiers`."""
        device, host = (until_s if is_asked else None for is_asked in tiers)
        return cls(level, until_s, (device, host))

    def is_held(self, now: float) -> bool:
        return self.level > ORDINARY and self.until_s > now

    def is_held_in(self, tier: int, now: float) -> bool:
        return self.level > ORDINARY and (self.tiers[tier] or 0.0) > now

    def joined(self, other: Retention, now: float) -> Retention:
        """What was asked before this is, as far as it still holds: in each tier as long as either
        does there."""
        if not other.is_held(now):
            return replace(self, stored=other.stored)
        if self.level <= ORDINARY:
            return other
        return Retention(
            max(self.level, other.level),
            max(self.until_s, other.until_s),
            (_later(self.tiers[0], other.tiers[0]), _later(self.tiers[1], other.tiers[1])),
            other.stored,
        )


def _later(one: float | None, other: float | None) -> float | None:
    return one if other is None or (one is not None and one > other) else other


class Retained:
    def __init__(
        self, order: EvictionPolicy, tier: int, clock: Callable[[], float], max_pages: int
    ) -> None:
        """`order`: of the tier's other holdings, where these fall back to."""
        self._order = order
        self._tier = tier
        self._clock = clock
        self.max_pages = max_pages
        self._first = EvictionQueue()
        self._levels = [EvictionQueue() for _ in range(MAX_LEVEL)]
        self.sizes: dict[Holding, int] = {}
        """Pages of every holding that stands here."""
        self.num_pages = 0
        """Retained; those that go first are not."""
        self._deadlines: list[tuple[float, int, Holding]] = []
        self._number = 0

    def put(self, holding: Holding, *, hot: bool = True) -> bool:
        """It is used now, or may go again. False: it is to stand among the others."""
        retention = holding.node.retention
        until_s = None if retention is None else retention.tiers[self._tier]
        if retention is None or retention.level == ORDINARY or until_s is None:
            return False
        if retention.level == GO_FIRST:
            if holding.node.hits:  # others use it
                return False
            self._stand(holding, self._first, hot=hot)
            return True
        if until_s <= self._clock():
            return False
        self._stand(holding, self._levels[retention.level - 1], hot=hot)
        self.num_pages += self.sizes[holding]
        self._note_deadline(holding)
        if len(self._deadlines) > 2 * len(self.sizes) + _STALE_DEADLINES:
            self._forget_stale()
        self._fall_back()
        return True

    def remove(self, holding: Holding) -> None:
        """One that stands here."""
        size = self.sizes.pop(holding)
        if holding.queue is not self._first:
            self.num_pages -= size
        assert holding.queue is not None
        holding.queue.remove(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        """`upper` was cut off `lower`, which stands here: same standing, right behind it."""
        assert lower.queue is not None
        lower.queue.insert_after(lower, upper)
        for holding in (lower, upper):
            self.sizes[holding] = len(holding.pages) // _PAGE_ID_BYTES
        if lower.queue is not self._first:
            self._note_deadline(upper)

    def before(self, evictable: Evictable) -> Holding | None:
        """What goes before all others."""
        self._expire()
        return self._victim(self._first, evictable)

    def behind(self, evictable: Evictable) -> Holding | None:
        """What goes when nothing else is left."""
        for queue in self._levels:
            holding = self._victim(queue, evictable)
            if holding is not None:
                return holding
        return None

    def keeps(self, holding: Holding) -> bool:
        """Does it stand here to be kept?"""
        return holding in self.sizes and holding.queue is not self._first

    def is_asked_for(self, holding: Holding) -> bool:
        """As something that stands here has to be, whether its time is over or not."""
        return holding.queue is self._first or self._until_s(holding) is not None

    def __iter__(self) -> Iterator[Holding]:
        """All of them."""
        return chain(self._first, *self._levels)

    # ---- inside ---------------------------------------------------------------------------------

    def _stand(self, holding: Holding, queue: EvictionQueue, *, hot: bool) -> None:
        (queue.push_hot if hot else queue.push_cold)(holding)
        self.sizes[holding] = len(holding.pages) // _PAGE_ID_BYTES

    def _victim(self, queue: EvictionQueue, evictable: Evictable) -> Holding | None:
        while (holding := queue.coldest()) is not None:
            if evictable(holding):
                return holding
            self.remove(holding)  # parked
        return None

    def _fall_back(self) -> None:
        if self.num_pages > self.max_pages:
            self._expire()  # what nobody asks for any more takes nobody's share
        for queue in self._levels:
            while self.num_pages > self.max_pages and (holding := queue.coldest()) is not None:
                self.remove(holding)
                self._order.insert(holding)

    def _expire(self) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, holding = heapq.heappop(self._deadlines)
            until_s = self._until_s(holding)
            is_over = until_s is not None and until_s <= now
            if is_over and holding in self.sizes and holding.queue is not self._first:
                self.remove(holding)
                if self._is_wanted_elsewhere(holding, now):
                    self._order.insert(holding)
                else:
                    self._stand(holding, self._first, hot=True)

    def _is_wanted_elsewhere(self, holding: Holding, now: float) -> bool:
        """Then it must not go before the other tier has it."""
        retention = holding.node.retention
        return retention is not None and retention.is_held(now)

    def _note_deadline(self, holding: Holding) -> None:
        until_s = self._until_s(holding)
        if until_s is None:  # what is asked now is not of this tier: it is about to be ranked anew
            return
        self._number += 1
        heapq.heappush(self._deadlines, (until_s, self._number, holding))

    def _until_s(self, holding: Holding) -> float | None:
        retention = holding.node.retention
        return None if retention is None else retention.tiers[self._tier]

    def _forget_stale(self) -> None:
        """Every use adds a deadline: keep the last of each."""
        last = {each[2]: each for each in sorted(self._deadlines, key=lambda each: each[1])}
        self._deadlines = [last[holding] for holding in self.sizes if holding in last]
        heapq.heapify(self._deadlines)
