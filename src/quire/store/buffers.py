"""Buffers that a call needs beside the pages: for headers, and for pages that are packed.

Of each thread its own, since a thread is in one call at a time. Block-aligned.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

from quire.store.base import HEADER_BYTES, MAX_OBJECTS, Blob, pages_per_call


class Headers(threading.local):
    """Header buffers, of each thread its own: a thread is in one call at a time."""

    def __init__(self) -> None:
        # An anonymous mapping starts on a page, which is what direct I/O asks for.
        self._view = memoryview(mmap.mmap(-1, MAX_OBJECTS * HEADER_BYTES))

    def blobs(self, pages: Sequence[memoryview]) -> list[Blob]:
        size = HEADER_BYTES
        return [Blob(self._view[i * size : (i + 1) * size], page) for i, page in enumerate(pages)]


class Room(threading.local):
    """Room for packed pages, of each thread its own, and taken when it is first needed."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def of(self, at: int, page_bytes: int) -> memoryview:
        """Of the `at`-th page of a call, whole blocks."""
        needed = pages_per_call(page_bytes) * page_bytes
        if self._view.nbytes < needed:
            self._view = memoryview(mmap.mmap(-1, needed))
        return self._view[at * page_bytes : (at + 1) * page_bytes]
