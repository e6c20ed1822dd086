"""The byte budget of a file store: room for what is written, made by letting the coldest go.

Knows sizes, the ledger and the queue of the coldest, both shared with all processes on the
directory; removing files is left to its owner. Holds nothing per object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.store.file.cold import ColdQueue
from quire.store.file.ledger import Ledger

MAX_EVICTIONS = 1024
"""For one write at most: a bound on the wait, if files cannot be removed."""


class Place(NamedTuple):
    """Where a file of just this size could be used again."""

    path: str
    size_bytes: int


Remove = Callable[[str, int, Place | None], int]
"""(name, bound, place): delete an object unless it was used at `bound` or later, or rename it to
the place if it fits. Returns its size; 0: it was used, or it is gone."""


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

    def recycle(self, places: Sequence[Place]) -> set[str]:
        """When the budget is used up: let the coldest objects go, and their files become those at
        the places, where they fit; the bytes used then stay the same. Returns the paths of those
        that did; for the others, `reserve`."""
        free_bytes = self.max_bytes - self._ledger.known.num_bytes
        wanted: list[Place] = []
        for place in places:
            free_bytes -= place.size_bytes
            if free_bytes < 0:
                wanted.append(place)
        reused: set[str] = set()

        def claim(name: str, bound_ns: int) -> bool:
            place = wanted[len(reused)]
            freed = self._remove(name, bound_ns, place)
            if freed == place.size_bytes:
                reused.add(place.path)
            elif freed:
                self._ledger.remove(freed)
            return freed > 0

        if wanted:
            self._evict(len(wanted), claim)
        return reused

    def release(self, size_bytes: int) -> None:
        """An object was not written after all, or is gone: its bytes are free again."""
        self._ledger.remove(size_bytes)

    def evict_one(self) -> int | None:
        """Evict the coldest object. Bytes freed, 0 if it was used or removed meanwhile, None when
        none is known."""
        freed = 0

        def claim(name: str, bound_ns: int) -> bool:
            nonlocal freed
            freed = self._remove(name, bound_ns, None)
            if freed:
                self._ledger.remove(freed)
            return freed > 0

        if not self._evict(1, claim) and self._cold.is_empty:
            return None
        return freed

    def _evict(self, count: int, claim: Callable[[str, int], bool]) -> int:
        num_gone = self._cold.take(count, claim)
        if num_gone < count and self._cold.is_empty and self._refill():
            num_gone += self._cold.take(count - num_gone, claim)
        self.num_evicted += num_gone
        return num_gone
