"""Turns: a few calls at a time, of all that want to be made. Knows nothing of what they do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

STILL_S = 0.25


class Turns:
    """Thread-safe. Nobody is kept waiting by calls that hang: when none has ended for a moment,
    who waits goes ahead."""

    def __init__(self, at_once: int, *, still_s: float = STILL_S) -> None:
        self._changed = threading.Condition()
        self._free = at_once
        self._still_s = still_s

    @contextmanager
    def turn(self) -> Iterator[None]:
        is_free = self._wait()
        try:
            yield
        finally:
            with self._changed:
                self._free += is_free
                self._changed.notify_all()

    def _wait(self) -> bool:
        """False: nothing was free, and nothing moves."""
        with self._changed:
            while not self._free:
                if not self._changed.wait(self._still_s):  # told whenever a call ends
                    return False
            self._free -= 1
            return True
