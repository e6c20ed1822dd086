"""What any cache of a size could do at best: an ideal LRU, and Belady's bound.

Both hold single pages, in one tier, and lose nothing to the order in which they are told things:

    ideal LRU   what was used longest ago goes first; of one request the last page first, so that no
                page goes before those that need it
    Belady      what will be used latest goes first, as if the future were known: no cache that has
                to hold what it answers with finds more

Hits are leading pages of a prompt: a page without those before it helps nobody. A request that the
device has no room for is cut for them as it is for the cache: see `ReplayOptions.fitting`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from quire.replay.trace import Trace

RoomAt = Callable[[float], int]
"""Pages there is room for when that share of the trace's time is over."""


class Bound(Protocol):
    def resize(self, num_pages: int) -> None: ...

    def use(self, index: int, pages: list[int], more: list[int]) -> int:
        """Request number `index` reads `pages` and adds `more`: how many it found."""


class IdealLru:
    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        """Coldest first."""
        self._size = 0

    def resize(self, num_pages: int) -> None:
        self._size = num_pages
        self._shrink()

    def use(self, index: int, pages: list[int], more: list[int]) -> int:
        order, hits = self._order, 0
        while hits < len(pages) and pages[hits] in order:
            hits += 1
        for page in (*reversed(more), *reversed(pages)):
            order[page] = None
            order.move_to_end(page)
        self._shrink()
        return hits

    def _shrink(self) -> None:
        for _ in range(len(self._order) - self._size):
            self._order.popitem(last=False)


class Belady:
    def __init__(self, trace: Trace) -> None:
        self._uses = _uses(trace)
        self._held: dict[int, int] = {}
        """Page → number of the request that uses it next."""
        self._latest: list[tuple[int, int]] = []
        """(−next use, −page), smallest first. Pages are numbered from the front of a prompt to its
        end, so of two that are used next by the same request the later one goes. Entries that are
        not true any more stay until they come up."""
        self._size = 0

    def resize(self, num_pages: int) -> None:
        self._size = num_pages
        self._shrink()

    def use(self, index: int, pages: list[int], more: list[int]) -> int:
        held, hits = self._held, 0
        while hits < len(pages) and pages[hits] in held:
            hits += 1
        for page in (*pages, *more):
            uses = self._uses[page]
            while uses and uses[-1] <= index:
                uses.pop()
            held.pop(page, None)
            if uses:  # else nobody will miss it
                held[page] = uses[-1]
                heapq.heappush(self._latest, (-uses[-1], -page))
        self._shrink()
        return hits

    def _shrink(self) -> None:
        held = self._held
        while len(held) > self._size:
            use, page = heapq.heappop(self._latest)
            if held.get(-page) == -use:
                del held[-page]


def hits_of(bound: Bound, trace: Trace, room: RoomAt) -> int:
    """Pages found by all requests together."""
    size, total = -1, 0
    for index, row in enumerate(trace.rows):
        if size != (now := room(trace.progress(row))):
            size = now
            bound.resize(size)
        total += bound.use(index, row.pages, row.answer_pages)
    return total


def _uses(trace: Trace) -> dict[int, list[int]]:
    """Page → the requests that read it, last one first."""
    uses: dict[int, list[int]] = {}
    for index in range(len(trace.rows) - 1, -1, -1):
        for page in trace.rows[index].pages:
            uses.setdefault(page, []).append(index)
        for page in trace.rows[index].answer_pages:
            uses.setdefault(page, [])
    return uses
