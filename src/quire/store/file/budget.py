"""The byte budget of a file store: how much all that have the directory open use together, and room
for what is written, made by letting the coldest go.

Knows sizes and the queue of the coldest; removing files is left to its owner. Holds nothing per
object.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.store.file.cold import ColdQueue
from quire.store.file.shared_file import SharedFile
from quire.store.file.space import FreeSpace

MAX_EVICTIONS = 1024
"""For one write at most: a bound on the wait, if files cannot be removed, or others fill the
disk."""

_NUMBERS = struct.Struct("<qq")


class SpaceUsed(NamedTuple):
    num_bytes: int = 0
    num_objects: int = 0

    def plus(self, other: SpaceUsed) -> SpaceUsed:
        return SpaceUsed(self.num_bytes + other.num_bytes, self.num_objects + other.num_objects)

    def minus(self, other: SpaceUsed) -> SpaceUsed:
        return SpaceUsed(self.num_bytes - other.num_bytes, self.num_objects - other.num_objects)


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
        self._shared = SpaceUsed()
        self._unsaid = SpaceUsed()
        self.total()  # writes, and so allocates, now: a disk that fills up later does not matter

    def total(self) -> SpaceUsed:
        """What everybody has said up to now."""
        with self._lock:
            self._sync()
            return self._shared

    @property
    def known(self) -> SpaceUsed:
        """The total as far as it is known here, without asking the others."""
        return self._shared.plus(self._unsaid)

    def reserve(self, size_bytes: int, max_bytes: int) -> bool:
        """Count one more object if that keeps the total within `max_bytes`."""
        one = SpaceUsed(size_bytes, 1)
        limit = max_bytes - size_bytes
        with self._lock:
            if self.known.num_bytes > limit or self._is_much(self._unsaid.plus(one)):
                before = self._sync(lambda now: now.plus(one) if now.num_bytes <= limit else now)
                return before.num_bytes <= limit
            self._unsaid = self._unsaid.plus(one)
            return True

    def remove(self, size_bytes: int) -> None:
        """One object is gone."""
        with self._lock:
            self._unsaid = self._unsaid.minus(SpaceUsed(size_bytes, 1))
            if self._is_much(self._unsaid):
                self._sync()

    def correct(self, before: SpaceUsed, found: SpaceUsed) -> None:
        """A scan that began at `before` found `found`. What changed during the scan was seen or
        not, so half of it is counted. Absolute, so that two scans at once agree."""

        def corrected(now: SpaceUsed) -> SpaceUsed:
            change = now.minus(before)
            return found.plus(SpaceUsed(change.num_bytes // 2, change.num_objects // 2))

        with self._lock:
            self._sync(corrected)

    def close(self) -> None:
        """Later calls raise OSError."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._sync()
            self._file.close()

    def _is_much(self, change: SpaceUsed) -> bool:
        return abs(change.num_bytes) >= self._step_bytes

    def _sync(self, change: Callable[[SpaceUsed], SpaceUsed] = lambda now: now) -> SpaceUsed:
        """Say what was not said yet, and change the total. Returns it as it was before that."""
        with self._file.locked():
            data = os.pread(self._file.fd, _NUMBERS.size, 0).ljust(_NUMBERS.size, b"\0")
            now = SpaceUsed(*_NUMBERS.unpack(data)).plus(self._unsaid)
            self._shared = SpaceUsed(*(max(0, number) for number in change(now)))
            os.pwrite(self._file.fd, _NUMBERS.pack(*self._shared), 0)
            self._unsaid = SpaceUsed()
            return now


class FilePlace(NamedTuple):
    """Where a file of just this size could be used again."""

    path: str
    size_bytes: int


Remove = Callable[[str, int, FilePlace | None], int]
"""(name, bound, place): delete an object unless it was used at `bound` or later, or rename it to
the place if it fits. Returns its size; 0: it was used, or it is gone."""


class Budget:
    """`reserve` or `recycle` before writing; `release` if nothing was written. Thread-safe."""

    def __init__(
        self,
        max_bytes: int,
        ledger: Ledger,
        space: FreeSpace,
        cold: ColdQueue,
        *,
        remove: Remove,
        refill: Callable[[], bool],
        delete_cleared: Callable[[], int],
    ) -> None:
        """`refill()` is asked when the queue is empty. True: look again. `delete_cleared()`
        deletes an object that was cleared, and says how large it was; 0: there is none."""
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._ledger = ledger
        self._space = space
        self._cold = cold
        self._remove = remove
        self._refill = refill
        self._delete_cleared = delete_cleared

    def reserve(self, size_bytes: int) -> bool:
        """Make room for an object, on the disk and within the budget, evicting as needed. False:
        it cannot be made."""
        lacking_bytes = self._space.lacking_bytes(size_bytes)
        if lacking_bytes is None or size_bytes > self.max_bytes:
            return False
        for _ in range(MAX_EVICTIONS):
            if lacking_bytes <= 0 and self._ledger.reserve(size_bytes, self.max_bytes):
                self._space.took(size_bytes)
                return True
            # Of a store that was cleared the queue knows nothing that is still there.
            freed_bytes = sum(self._evict([None])) or self._delete_cleared()
            if not freed_bytes and self._cold.is_empty:
                break
            lacking_bytes -= freed_bytes
        if lacking_bytes > 0:
            self._space.too_little()
        return False

    def recycle(self, places: Sequence[FilePlace]) -> set[str]:
        """When the budget is used up: let the coldest objects go, and their files become those at
        the places, where they fit; the bytes used then stay the same. Returns the paths of those
        that did; for the others, `reserve`."""
        free_bytes = self.max_bytes - self._ledger.known.num_bytes
        wanted: list[FilePlace] = []
        for place in places:
            free_bytes -= place.size_bytes
            if free_bytes < 0:
                wanted.append(place)
        gone = zip(wanted, self._evict(wanted), strict=False) if wanted else ()
        return {place.path for place, freed in gone if freed == place.size_bytes}

    def release(self, size_bytes: int) -> None:
        """An object was not written after all, or is gone: its bytes are free again."""
        self._ledger.remove(size_bytes)

    def _evict(self, places: Sequence[FilePlace | None]) -> list[int]:
        """Let as many of the coldest objects go, each to its place if it fits there. The sizes of
        those that went: fewer, if others were used or removed meanwhile, or none is known."""
        gone: list[int] = []

        def claim(name: str, bound_ns: int) -> bool:
            place = places[len(gone)]
            freed = self._remove(name, bound_ns, place)
            if freed:
                gone.append(freed)
            if freed and (place is None or freed != place.size_bytes):
                self._ledger.remove(freed)
            return freed > 0

        self._cold.take(len(places), claim)
        if len(gone) < len(places) and self._cold.is_empty and self._refill():
            self._cold.take(len(places) - len(gone), claim)
        self.num_evicted += len(gone)
        return gone
