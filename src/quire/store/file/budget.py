"""The byte budget of a file store: how much all openers use, and what goes when it is too much.

Two pieces. `Ledger`: one number in a file, changed under a lock, so that all processes on the
directory account together. `Budget`: this process's idea of what is there, coldest first, from
which it evicts; what other processes did is learnt by the next scan, and an entry that has gone
meanwhile costs nothing. Knows sizes and names; removing files is left to its owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

_NUMBER = struct.Struct("<q")


class Ledger:
    """Bytes used by all stores open on a directory.

    Each process gathers its own changes and adds them to the shared number once they reach
    `step_bytes`, so that a write need not pay for a lock between processes. Others are therefore
    seen up to a step late, and what a crash left unsaid is set right by the next scan.
    """

    def __init__(self, path: str, step_bytes: int) -> None:
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._step_bytes = step_bytes
        # flock keeps processes apart, but not the threads that share this descriptor.
        self._lock = threading.Lock()
        self._shared = 0
        self._unsaid = 0
        self.total()  # writes, and so allocates, now: a disk that fills up later does not matter

    def total(self) -> int:
        """What everybody has said up to now."""
        with self._lock:
            self._sync(lambda total: total + self._unsaid)
            return self._shared

    @property
    def known(self) -> int:
        """The total as far as it is known here, without asking the others."""
        return self._shared + self._unsaid

    def add(self, num_bytes: int) -> int:
        """Returns the new total, as far as it is known here."""
        with self._lock:
            self._unsaid += num_bytes
            if abs(self._unsaid) >= self._step_bytes:
                self._sync(lambda total: total + self._unsaid)
            return self.known

    def correct(self, total_before: int, found: int) -> None:
        """A scan that began at `total_before` found `found` bytes. What changed during the scan
        was seen or not, so half of it is counted. Absolute, so that two scans at once agree."""
        with self._lock:
            self._sync(lambda total: found + (total + self._unsaid - total_before) // 2)

    def close(self) -> None:
        """Later calls raise OSError: the descriptor's number may by then be somebody else's."""
        with self._lock:
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    self._sync(lambda total: total + self._unsaid)
                os.close(self._fd)
                self._fd = None

    def _sync(self, change: Callable[[int], int]) -> None:
        if self._fd is None:
            raise OSError(errno.EBADF, "the store is closed")
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            data = os.pread(self._fd, _NUMBER.size, 0)
            total = _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else 0
            self._shared = max(0, change(total))
            os.pwrite(self._fd, _NUMBER.pack(self._shared), 0)
            self._unsaid = 0
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Budget:
    """`reserve` before writing, then `touch` what was published or `release`. Thread-safe."""

    def __init__(self, max_bytes: int, ledger: Ledger, remove: Callable[[str], int]) -> None:
        """`remove(name)` deletes an object and returns the bytes that freed, 0 if it was gone."""
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._ledger = ledger
        self._remove = remove
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, int] = OrderedDict()
        """Size by name, coldest first."""

    @property
    def num_objects(self) -> int:
        with self._lock:
            return len(self._objects)

    @property
    def used_bytes(self) -> int:
        return self._ledger.total()

    def reserve(self, size_bytes: int) -> bool:
        """Make room for an object, evicting as needed. False: it cannot be made."""
        if size_bytes > self.max_bytes:
            return False
        total = self._ledger.add(size_bytes)
        while total > self.max_bytes:
            freed = self.evict_one()
            if freed is None:
                self._ledger.add(-size_bytes)
                return False
            total -= freed
            if total <= self.max_bytes:
                total = self._ledger.total()
        return True

    def take_over(self, size_bytes: int) -> str | None:
        """When the budget is used up: the coldest object, if it has just this size.

        The caller writes the new object into the old one's file, so the bytes used stay the same;
        `release` them if it cannot. None: use `reserve`.
        """
        if self._ledger.known + size_bytes <= self.max_bytes:
            return None
        with self._lock:
            name = next(iter(self._objects), None)
            if name is None or self._objects[name] != size_bytes:
                return None
            del self._objects[name]
            self.num_evicted += 1
            return name

    def release(self, size_bytes: int) -> None:
        """What was reserved was not written."""
        self._ledger.add(-size_bytes)

    def touch(self, name: str, size_bytes: int) -> None:
        """The object was published or used: it is there, and hot."""
        with self._lock:
            self._objects[name] = size_bytes
            self._objects.move_to_end(name)

    def touch_known(self, name: str) -> None:
        """The same for an object of unknown size: the next scan tells, if it is new to us."""
        with self._lock:
            if name in self._objects:
                self._objects.move_to_end(name)

    def forget(self, name: str, size_bytes: int) -> None:
        """The object was taken out of the store by its owner: `size_bytes` are free again."""
        with self._lock:
            self._objects.pop(name, None)
        self._ledger.add(-size_bytes)

    def evict_one(self) -> int | None:
        """Evict the coldest object known. Bytes freed, 0 if somebody else was faster, None when
        none is known."""
        with self._lock:
            if not self._objects:
                return None
            name, _ = self._objects.popitem(last=False)
        freed = self._remove(name)
        if freed:
            self._ledger.add(-freed)
            self.num_evicted += 1
        return freed

    def names(self) -> set[str]:
        with self._lock:
            return set(self._objects)

    def learn(self, found: Iterable[tuple[str, int]], gone: set[str], *, as_cold: bool) -> None:
        """Take over what a scan saw; `found` is ordered coldest first.

        The first scan sees files older than everything done since opening: they go to the cold
        end. What later scans find new was written by others meanwhile, and goes to the hot end.
        """
        entries = list(found)
        for name, size_bytes in reversed(entries) if as_cold else entries:
            with self._lock:  # per entry, so that writers do not wait for a long list
                if name not in self._objects:
                    self._objects[name] = size_bytes
                    self._objects.move_to_end(name, last=not as_cold)
        for name in gone:
            with self._lock:
                self._objects.pop(name, None)

    def close(self) -> None:
        self._ledger.close()


class FreshTimes:
    """Which files' times were renewed lately. Not locked: at worst a time is renewed twice."""

    def __init__(self, clock: Callable[[], float], period_s: float) -> None:
        self._clock = clock
        self._period_s = period_s
        self._names: set[str] = set()
        self._until = float("-inf")

    def is_due(self, name: str) -> bool:
        """True once per name and period."""
        now = self._clock()
        if now >= self._until:
            self._names = set()
            self._until = now + self._period_s
        if name in self._names:
            return False
        self._names.add(name)
        return True
