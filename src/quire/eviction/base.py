"""What an eviction policy is: an order over the holdings of one tier, coldest first.

Every READY holding of a tier is in its policy, locked or not, so that locking costs a counter and
no list operation. A holding met at the cold end that may not go now (locked, or others hang below
it) is *parked*: taken out of the order until `touch` or `unpark` brings it back. Each lock period
parks a holding at most once, so that finding a victim costs O(1) amortised, however many leaves
there are.

The tree calls `insert` and `touch` child first along a path. A policy that keeps parents behind
their children (all of ours do) therefore has an evictable leaf at its cold end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Union, cast

if TYPE_CHECKING:
    from quire.tree import Holding

Evictable = Callable[["Holding"], bool]
_Link = Union["Holding", "EvictionQueue"]
"""What a link of a queue may point at."""


class EvictionQueue:
    """Intrusive doubly linked list of holdings, cold end first. A holding is in at most one."""

    __slots__ = ("_next", "_prev")

    def __init__(self) -> None:
        # The queue is its own sentinel: an empty one points at itself.
        self._prev: _Link = self
        self._next: _Link = self

    def push_hot(self, holding: Holding) -> None:
        last = self._prev
        holding._prev, holding._next, holding.queue = last, self, self
        last._next = self._prev = holding

    def push_cold(self, holding: Holding) -> None:
        self._link(self, holding, self._next)

    def insert_after(self, where: Holding, holding: Holding) -> None:
        after = where._next
        assert after is not None
        self._link(where, holding, after)

    def remove(self, holding: Holding) -> None:
        before, after = holding._prev, holding._next
        assert before is not None
        assert after is not None
        before._next = after
        after._prev = before
        # None and not itself: a cycle would leave every evicted holding to the garbage collector.
        holding._prev = holding._next = holding.queue = None

    def coldest(self) -> Holding | None:
        first = self._next
        return None if first is self else cast("Holding", first)

    def hottest(self) -> Holding | None:
        last = self._prev
        return None if last is self else cast("Holding", last)

    def __iter__(self) -> Iterator[Holding]:
        at: _Link | None = self._next
        while at is not self:
            holding = cast("Holding", at)
            yield holding
            at = holding._next

    def _link(self, before: _Link, holding: Holding, after: _Link) -> None:
        holding._prev = before
        holding._next = after
        before._next = holding
        after._prev = holding
        holding.queue = self


class EvictionPolicy:
    """Queues of holdings, that of the coldest first. A policy says which queue a holding enters."""

    def __init__(self, num_queues: int) -> None:
        self._queues = [EvictionQueue() for _ in range(num_queues)]

    def queue_for(self, holding: Holding) -> EvictionQueue:
        """Where a holding enters that is used now."""
        return self._queues[0]

    def insert(self, holding: Holding) -> None:
        """The holding has become READY in this tier."""
        self.queue_for(holding).push_hot(holding)

    def touch(self, holding: Holding) -> None:
        """It was used, and its last user has just let go. Brings a parked one back."""
        self.remove(holding)
        self.insert(holding)

    def unpark(self, holding: Holding) -> None:
        """It may go again although nobody used it: back to the cold end if parked."""
        if holding.queue is None:
            self.queue_for(holding).push_cold(holding)

    def split(self, lower: Holding, upper: Holding) -> None:
        """`upper` was cut off `lower`, its child: same standing, right behind it, or parked."""
        if lower.queue is not None:
            lower.queue.insert_after(lower, upper)

    def remove(self, holding: Holding) -> None:
        """It is gone from this tier."""
        if holding.queue is not None:
            holding.queue.remove(holding)

    def victim(self, evictable: Evictable) -> Holding | None:
        """The coldest holding that may go (it stays in the order), or None. Parks those in front
        of it."""
        for queue in self._queues:
            while (holding := queue.coldest()) is not None:
                if evictable(holding):
                    return holding
                self.remove(holding)
        return None

    def coldest(self) -> Iterator[Holding]:
        """From the cold end on. The order must not change while iterating."""
        return chain.from_iterable(self._queues)
