"""Lately: names that something was just done to. Forgets the oldest, and all after a moment.

Most of all those that were just made (`just_made`), see Making: if somebody takes them out
meanwhile, what follows is of no use, and found to be so by who asks next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from quire.store.base import ObjectName

_MADE_S, _MAX_MADE = 10.0, 1 << 14
"""How long, and how many of, the objects that were written here count as there, and what follows
them as new, without a question."""


class Lately:
    """Thread-safe."""

    def __init__(self, *, keep_s: float, max_names: int, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._max_names = max_names
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[ObjectName, float] = {}
        """Those that go first come first."""

    def __contains__(self, name: ObjectName) -> bool:
        with self._lock:
            return self._until.get(name, float("-inf")) > self._clock()

    def add(self, names: Iterable[ObjectName]) -> None:
        with self._lock:
            now = self._clock()
            for name in names:
                self._until.pop(name, None)
                self._until[name] = now + self._keep_s
            while self._until and (
                self._until[oldest := next(iter(self._until))] <= now
                or len(self._until) > self._max_names
            ):
                del self._until[oldest]

    def discard(self, names: Iterable[ObjectName]) -> None:
        with self._lock:
            for name in names:
                self._until.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()


def just_made() -> Lately:
    """Objects that this process has written, and that were not there before."""
    return Lately(keep_s=_MADE_S, max_names=_MAX_MADE, clock=time.monotonic)
