"""Memory that the client may move bytes from and to: it must be registered, once.

Host pools are large mappings that live as long as their engine: the first page of one registers all
of it, and from then on its pages move in place. What is small or passing (headers, pages of tests)
goes by way of a stage, which is lent to one call at a time. Knows no pages and no names.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np

from quire.errors import StoreError

POOL_BYTES = 4 << 20
"""Of this size on a mapping counts as a pool."""
MAX_POOLS = 64
"""Registered at most: pages of further ones are staged."""


class RegisteredRange(NamedTuple):
    start: int
    end: int
    owner: object
    """Keeps the memory where it is."""


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.nbytes else 0


class StagingArea:
    """A registered mapping, given out from its beginning; of one call."""

    def __init__(self, size_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address(self.view)
        self._used = 0

    def take(self, size_bytes: int) -> tuple[memoryview, int]:
        at, self._used = self._used, self._used + size_bytes
        return self.view[at : at + size_bytes], self.address + at

    def empty(self) -> None:
        self._used = 0


class Memory:
    """Thread-safe. `register` and `unregister` are the client's. What raises StoreError was not
    registered, and is not any more."""

    def __init__(
        self, register: Callable[[int, int], bool], unregister: Callable[[int], None]
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._lock = threading.Lock()
        self._pools: list[RegisteredRange] = []
        self._stages: list[StagingArea] = []
        """Not lent at the moment."""

    def in_place(self, view: memoryview) -> int | None:
        """Where it lies, if its bytes can move without a copy."""
        start = address(view)
        with self._lock:
            if self._is_known(start, start + view.nbytes):
                return start
            pool = _pool_of(view)
            if pool is None or len(self._pools) >= MAX_POOLS:
                return None
            if not self._register(pool.start, pool.end - pool.start):
                return None
            self._pools.insert(bisect_right(self._pools, pool.start, key=_start), pool)
        return start

    def staged_bytes(self, pieces: Iterable[Iterable[memoryview]]) -> int:
        """Of these, what must be copied: headers, and pages of no pool."""
        alone = (view for views in pieces for view in views if self.in_place(view) is None)
        return sum(view.nbytes for view in alone)

    @contextmanager
    def stage(self, size_bytes: int) -> Iterator[StagingArea]:
        """Room for so many bytes, until the call is over."""
        stage = self._lend(size_bytes)
        try:
            yield stage
        finally:
            stage.empty()
            with self._lock:
                self._stages.append(stage)

    def _is_known(self, start: int, end: int) -> bool:
        index = bisect_right(self._pools, start, key=_start) - 1
        return index >= 0 and end <= self._pools[index].end

    def _lend(self, size_bytes: int) -> StagingArea:
        with self._lock:
            for index, stage in enumerate(self._stages):
                if stage.view.nbytes >= size_bytes:
                    return self._stages.pop(index)
            if self._stages:  # too small: it gives way to one that is not
                with suppress(StoreError):  # the pool was left, and then nobody knows it any more
                    self._unregister(self._stages.pop().address)
        made = StagingArea(max(1 << 20, 1 << (size_bytes - 1).bit_length()))
        if not self._register(made.address, made.view.nbytes):
            raise MemoryError("the pool's client takes no more memory")
        return made


def _pool_of(view: memoryview) -> RegisteredRange | None:
    """The whole mapping that a page is a part of; None: not one to be registered."""
    if not isinstance(view.obj, mmap.mmap):
        return None
    whole = memoryview(view.obj)
    if whole.nbytes < POOL_BYTES:
        return None
    start = address(whole)
    return RegisteredRange(start, start + whole.nbytes, view.obj)


def _start(region: RegisteredRange) -> int:
    return region.start
