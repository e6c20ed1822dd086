"""Is there disk space to write, and is the disk taking writes at all? Knows no objects.

    writable ──ENOSPC, EDQUOT, EROFS──▶ read-only for RETRY_AFTER_S ──▶ writable (tried again)

Space below the reserve is first won back by evicting our own objects: a cache yields the disk to
whoever fills it. When there is nothing left to evict, writes are declined.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from quire.sizes import format_bytes

RETRY_AFTER_S = 30.0
REFRESH_AFTER_S = 0.5
MAX_EVICTIONS = 64
"""Objects evicted on behalf of one write at most, so that no single write pays for all."""


def default_reserve(root: Path) -> int:
    """5 GiB, or 5 % of a file system smaller than 100 GiB."""
    disk = os.statvfs(root)
    return min(5 << 30, disk.f_blocks * disk.f_frsize // 20)


class FreeSpace:
    """Thread-safe."""

    def __init__(self, root: Path, reserve_bytes: int, clock: Callable[[], float]) -> None:
        self._root = root
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._free_bytes = 0
        self._known_until = float("-inf")
        self._refused_until = float("-inf")
        self._reason = ""

    @property
    def read_only(self) -> str:
        """Why nothing is written at the moment, or nothing."""
        with self._lock:
            return self._reason

    def take(self, size_bytes: int, evict_one: Callable[[], int | None]) -> bool:
        """Count on `size_bytes` for a write, if there is room. Evicts to keep the reserve free."""
        with self._lock:
            now = self._clock()
            if now < self._refused_until:
                return False
            if now >= self._known_until:
                self._look(now)
            shortfall = self._reserve_bytes + size_bytes - self._free_bytes
            if shortfall <= 0:
                self._free_bytes -= size_bytes
                self._reason = ""
                return True
        for _ in range(MAX_EVICTIONS):
            freed = evict_one()
            if freed is None:
                break
            shortfall -= freed
            if shortfall <= 0:
                break
        with self._lock:
            self._known_until = float("-inf")
            self._reason = "" if shortfall <= 0 else self._low()
            return shortfall <= 0

    def refused(self, error: OSError) -> None:
        """The disk would not take a write."""
        with self._lock:
            self._refused_until = self._clock() + RETRY_AFTER_S
            self._known_until = float("-inf")
            self._reason = f"the disk refuses writes: {error.strerror}"

    def _look(self, now: float) -> None:
        disk = os.statvfs(self._root)
        self._free_bytes = disk.f_bavail * disk.f_frsize
        self._known_until = now + REFRESH_AFTER_S

    def _low(self) -> str:
        return f"less than the reserve of {format_bytes(self._reserve_bytes)} is free on the disk"
