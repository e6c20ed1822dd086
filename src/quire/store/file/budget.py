"""The byte budget of a file store: room for what is written, made by letting the coldest go.

Knows sizes, the ledger and the queue of the coldest, both shared with all processes on the
directory; removing files is left to its owner. Holds nothing per object.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.store.file.cold import ColdQueue
from quire.store.file.ledger import Ledger

MAX_EVICTIONS = 1024
"""For one write at most: a bound on the wait, if files cannot be removed."""

Remove = Callable[[str, int, str | None], int]
"""(name, bound, path): delete an object, or rename it to `path`, unless it was used at `bound` or
later. Returns its size; 0: it was, or it is gone."""


class Budget:
    """`reserve` or `recycle` before writing; `release` if nothing was written. Thread-safe."""

    def __init__(
        self,
        max_bytes: int,
        ledger: Ledger,
        cold: ColdQueue,
        remove: Remove,
        refill: Callable[[], bool],
    ) -> None:
        """`refill()` is asked when the queue is empty. True: look again."""
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self._ledger = ledger
        self._cold = cold
        self._remove = remove
        self._refill = refill

    def reserve(self, size_bytes: int) -> bool:
        """Make room for an object, evicting as needed. False: it cannot be made."""
        if size_bytes > self.max_bytes:
            return False
        for _ in range(MAX_EVICTIONS):
            if self._ledger.reserve(size_bytes, self.max_bytes):
                return True
            if self.evict_one() is None:
                break
        return False

    def recycle(self, size_bytes: int, path: str) -> bool:
        """When the budget is used up: let the coldest object go, and its file become `path`, if
        it has just this size; the bytes used then stay the same. False: use `reserve`."""
        if self._ledger.known.num_bytes + size_bytes <= self.max_bytes:
            return False
        freed = self._evict(path)
        if freed and freed != size_bytes:
            self._ledger.remove(freed)
        return freed == size_bytes

    def release(self, size_bytes: int) -> None:
        """An object was not written after all, or is gone: its bytes are free again."""
        self._ledger.remove(size_bytes)

    def evict_one(self) -> int | None:
        """Evict the coldest object. Bytes freed, 0 if it was used or removed meanwhile, None when
        none is known."""
        freed = self._evict(None)
        if freed:
            self._ledger.remove(freed)
        return freed

    def _evict(self, into: str | None) -> int | None:
        def claim(name: str, bound_ns: int) -> int:
            return self._remove(name, bound_ns, into)

        freed = self._cold.take(claim)
        if freed is None and self._refill():
            freed = self._cold.take(claim) or 0
        if freed:
            self.num_evicted += 1
        return freed
