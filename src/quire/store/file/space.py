"""Is there disk space to write, and is the disk taking writes at all? Knows no objects.

    writable ──ENOSPC, EDQUOT, EROFS──▶ read-only for RETRY_AFTER_S ──▶ writable (tried again)

Space below the reserve is first won back by evicting our own objects (budget.py): a cache yields
the disk to whoever fills it. When there is nothing left to evict, writes are declined.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from quire.sizes import format_bytes

RETRY_AFTER_S = 30.0
REFRESH_AFTER_S = 0.5


class FreeSpace:
    """Thread-safe."""

    def __init__(self, root: Path, reserve_bytes: int | None, clock: Callable[[], float]) -> None:
        """The default reserve is 5 GiB, or 5 % of a smaller file system. Raises OSError."""
        if reserve_bytes is None:
            disk = os.statvfs(root)
            reserve_bytes = min(5 << 30, disk.f_blocks * disk.f_frsize // 20)
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

    def lacking_bytes(self, size_bytes: int) -> int | None:
        """What must be freed to write so much and keep the reserve: 0 or less, nothing. None: the
        disk refuses writes."""
        with self._lock:
            now = self._clock()
            if now < self._refused_until:
                return None
            if now >= self._known_until:
                disk = os.statvfs(self._root)
                self._free_bytes = disk.f_bavail * disk.f_frsize
                self._known_until = now + REFRESH_AFTER_S
            lacking = self._reserve_bytes + size_bytes - self._free_bytes
            if lacking > 0:  # if it is freed, there is more than we know
                self._known_until = float("-inf")
            return lacking

    def took(self, size_bytes: int) -> None:
        """So much will be written."""
        with self._lock:
            self._free_bytes -= size_bytes
            self._reason = ""

    def too_little(self) -> None:
        """Not enough could be freed."""
        with self._lock:
            reserve = format_bytes(self._reserve_bytes)
            self._reason = f"less than the reserve of {reserve} is free on the disk"

    def refused(self, error: OSError) -> None:
        """The disk would not take a write."""
        with self._lock:
            self._refused_until = self._clock() + RETRY_AFTER_S
            self._known_until = float("-inf")
            self._reason = f"the disk refuses writes: {error.strerror}"
