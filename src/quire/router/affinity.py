"""AffinityIndex: which server holds which page, as far as their events have told.

A hint, never a promise: bounded, a moment behind, and possibly wrong, which costs a hit and nothing
else. The store tier is left out: servers share it, so it favours none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_TIERS = {"device": 1, "host": 2}


class AffinityIndex:
    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._holders: OrderedDict[bytes, dict[str, int]] = OrderedDict()
        """By page key, least recently used first: server → its tiers that hold it, as bits."""

    def __len__(self) -> int:
        return len(self._holders)

    def stored(self, server: str, tier: str, keys: Iterable[bytes]) -> None:
        bit = _TIERS.get(tier)
        if bit is None:
            return
        for key in keys:
            holders = self._holders.setdefault(key, {})
            holders[server] = holders.get(server, 0) | bit
            self._holders.move_to_end(key)
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def removed(self, server: str, tier: str, keys: Iterable[bytes]) -> None:
        bit = _TIERS.get(tier, 0)
        for key in keys:
            holders = self._holders.get(key)
            if holders is not None and server in holders:
                holders[server] &= ~bit
                if not holders[server]:
                    self._drop(key, server)

    def forget(self, server: str) -> None:
        """It has started anew, or its events have a gap."""
        for key in [key for key, holders in self._holders.items() if server in holders]:
            self._drop(key, server)

    def matched(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Server → how many pages of this prefix it holds, from the first on without a gap."""
        matched: dict[str, int] = {}
        for i, key in enumerate(keys):
            holders = self._holders.get(key)
            if holders is None:
                break
            self._holders.move_to_end(key)
            follow = [server for server in holders if matched.get(server, 0) == i]
            if not follow:
                break
            matched.update(dict.fromkeys(follow, i + 1))
        return matched

    def _drop(self, key: bytes, server: str) -> None:
        del self._holders[key][server]
        if not self._holders[key]:
            del self._holders[key]
