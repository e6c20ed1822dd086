"""Homes: which server keeps which response, so that whoever goes on with it is sent there."""

from __future__ import annotations

from collections import OrderedDict

_MAX_HOMES = 100_000


class Homes:
    def __init__(self, capacity: int = _MAX_HOMES) -> None:
        self._urls: OrderedDict[str, str] = OrderedDict()
        self._capacity = capacity

    def keep(self, name: str, url: str) -> None:
        if name:
            self._urls[name] = url
            self._urls.move_to_end(name)
            if len(self._urls) > self._capacity:
                self._urls.popitem(last=False)

    def of(self, name: str) -> str | None:
        """None: not known."""
        return self._urls.get(name)
