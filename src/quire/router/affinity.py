"""AffinityIndex: which server holds which page, as far as their events have told.

A hint, never a promise: bounded, a moment behind, and possibly wrong, which costs a hit and nothing
else. The store tier is left out: servers share it, so it favours none.

Each server has a table of its own, so that to forget a server is to set its table aside: at once,
whatever it knew. What was set aside is freed by `sweep`, in slices, so that nobody who waits for
the same loop notices.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

_TIERS = {"device": 1, "host": 2}


class AffinityIndex:
    def __init__(self, max_pages: int) -> None:
        """`max_pages`: of all servers together; one that two have counts twice."""
        self._max_pages = max_pages
        self._tables: dict[str, OrderedDict[bytes, int]] = {}
        """By server: page key, least recently used first → its tiers that hold it, as bits."""
        self._num_pages = 0
        self._aside: deque[OrderedDict[bytes, int]] = deque()
        """Nobody's any more."""

    def __len__(self) -> int:
        """Pages known, for each server that has them."""
        return self._num_pages

    def stored(self, server: str, tier: str, keys: Iterable[bytes]) -> None:
        bit = _TIERS.get(tier)
        if bit is None:
            return
        table = self._tables.setdefault(server, OrderedDict())
        before = len(table)
        for key in keys:
            table[key] = table.get(key, 0) | bit
            table.move_to_end(key)
        self._num_pages += len(table) - before
        self._make_room()

    def removed(self, server: str, tier: str, keys: Iterable[bytes]) -> None:
        bit = _TIERS.get(tier, 0)
        table = self._tables.get(server)
        if table is None:
            return
        for key in keys:
            tiers = table.get(key)
            if tiers is None:
                continue
            if left := tiers & ~bit:
                table[key] = left
            else:
                del table[key]
                self._num_pages -= 1

    def forget(self, server: str) -> None:
        """It has started anew, or its events have a gap."""
        table = self._tables.pop(server, None)
        if table:
            self._num_pages -= len(table)
            self._aside.append(table)

    def sweep(self, max_pages: int) -> bool:
        """Free so many of what was set aside. Is there more?"""
        while self._aside and max_pages > 0:
            table = self._aside[0]
            for _ in range(min(max_pages, len(table))):
                table.popitem(last=False)
                max_pages -= 1
            if not table:
                self._aside.popleft()
        return bool(self._aside)

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Server → how many pages of this prefix it holds, from the first on without a gap."""
        matched: dict[str, int] = {}
        for server, table in self._tables.items():
            count = 0
            for key in keys:
                if key not in table:
                    break
                table.move_to_end(key)
                count += 1
            if count:
                matched[server] = count
        return matched

    def _make_room(self) -> None:
        """What was not used for longest goes, of the server of which most is known."""
        while (too_many := self._num_pages - self._max_pages) > 0:
            table = max(self._tables.values(), key=len)
            count = min(too_many, len(table))
            for _ in range(count):
                table.popitem(last=False)
            self._num_pages -= count
