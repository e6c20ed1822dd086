"""Ledger: how much all stores open on a directory use together. Knows numbers only."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from quire.store.file.shared import SharedFile

_NUMBERS = struct.Struct("<qq")


class Usage(NamedTuple):
    num_bytes: int = 0
    num_objects: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(self.num_bytes + other.num_bytes, self.num_objects + other.num_objects)

    def minus(self, other: Usage) -> Usage:
        return Usage(self.num_bytes - other.num_bytes, self.num_objects - other.num_objects)


class Ledger:
    """Two numbers in a file, changed under a lock, so that all processes account together.

    Each process gathers its own changes and adds them once they reach `step_bytes`, so that a
    write need not pay for a lock between processes. Others are therefore seen up to a step late,
    and what a crash left unsaid is set right by the next scan.
    """

    def __init__(self, path: str, step_bytes: int) -> None:
        self._file = SharedFile(path)
        self._step_bytes = step_bytes
        self._lock = threading.Lock()
        self._shared = Usage()
        self._unsaid = Usage()
        self.total()  # writes, and so allocates, now: a disk that fills up later does not matter

    def total(self) -> Usage:
        """What everybody has said up to now."""
        with self._lock:
            self._sync(lambda total: total.plus(self._unsaid))
            return self._shared

    @property
    def known(self) -> Usage:
        """The total as far as it is known here, without asking the others."""
        return self._shared.plus(self._unsaid)

    def reserve(self, size_bytes: int, max_bytes: int) -> bool:
        """Count one more object if that keeps the total within `max_bytes`."""
        one = Usage(size_bytes, 1)
        fits = True

        def change(total: Usage) -> Usage:
            nonlocal fits
            now = total.plus(self._unsaid)
            fits = now.num_bytes + size_bytes <= max_bytes
            return now.plus(one) if fits else now

        with self._lock:
            if (
                self.known.num_bytes + size_bytes > max_bytes
                or abs(self._unsaid.num_bytes + size_bytes) >= self._step_bytes
            ):
                self._sync(change)
            else:
                self._unsaid = self._unsaid.plus(one)
            return fits

    def remove(self, size_bytes: int) -> None:
        """One object is gone."""
        with self._lock:
            self._unsaid = self._unsaid.minus(Usage(size_bytes, 1))
            if abs(self._unsaid.num_bytes) >= self._step_bytes:
                self._sync(lambda total: total.plus(self._unsaid))

    def correct(self, before: Usage, found: Usage) -> None:
        """A scan that began at `before` found `found`. What changed during the scan was seen or
        not, so half of it is counted. Absolute, so that two scans at once agree."""

        def corrected(total: Usage) -> Usage:
            change = total.plus(self._unsaid).minus(before)
            return found.plus(Usage(change.num_bytes // 2, change.num_objects // 2))

        with self._lock:
            self._sync(corrected)

    def close(self) -> None:
        """Later calls raise OSError."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._sync(lambda total: total.plus(self._unsaid))
            self._file.close()

    def _sync(self, change: Callable[[Usage], Usage]) -> None:
        with self._file.locked() as fd:
            data = os.pread(fd, _NUMBERS.size, 0).ljust(_NUMBERS.size, b"\0")
            changed = change(Usage(*_NUMBERS.unpack(data)))
            self._shared = Usage(max(0, changed.num_bytes), max(0, changed.num_objects))
            os.pwrite(fd, _NUMBERS.pack(*self._shared), 0)
            self._unsaid = Usage()
