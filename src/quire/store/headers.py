"""Block-aligned header buffers, reused. Knows only their size."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from quire.store.base import HEADER_BYTES


class HeaderPool:
    """Sets of `set_size` headers. Grows to as many sets as are ever borrowed at once."""

    def __init__(self, set_size: int) -> None:
        self._set_size = set_size
        # append and pop of a deque are atomic: no lock on the path of every chunk.
        self._free: deque[list[memoryview]] = deque()

    @contextmanager
    def borrow(self) -> Iterator[list[memoryview]]:
        try:
            headers = self._free.pop()
        except IndexError:
            headers = self._allocate()
        try:
            yield headers
        finally:
            self._free.append(headers)

    def _allocate(self) -> list[memoryview]:
        # An anonymous mapping starts on a page, which is what direct I/O asks for.
        view = memoryview(mmap.mmap(-1, self._set_size * HEADER_BYTES))
        return [view[i * HEADER_BYTES : (i + 1) * HEADER_BYTES] for i in range(self._set_size)]
