"""Lately: names that something was just done to. Forgets the oldest, and all after a moment."""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.store.base import ObjectName


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

    def add(self, name: ObjectName) -> None:
        with self._lock:
            now = self._clock()
            self._until.pop(name, None)
            self._until[name] = now + self._keep_s
            while (oldest := next(iter(self._until))) != name and (
                self._until[oldest] <= now or len(self._until) > self._max_names
            ):
                del self._until[oldest]

    def discard(self, name: ObjectName) -> None:
        with self._lock:
            self._until.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._until.clear()
