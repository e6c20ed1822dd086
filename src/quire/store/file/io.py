"""Moving objects between files and their buffers: direct I/O, vectored, several at a time, no copy.

Knows descriptors and buffers; nothing of names, budgets or checksums.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence

from quire.store.base import HEADER_BYTES
from quire.store.file.aio import Ring, open_ring

_O_DIRECT = getattr(os, "O_DIRECT", 0)

Buffers = Sequence[memoryview]
Results = list[int]
"""Bytes moved per object, or minus errno."""


class BulkIO:
    """Reads and writes groups of files. Thread-safe."""

    def __init__(self, scratch: str) -> None:
        """`scratch` is a file to create and remove, on the disk in question. Raises OSError."""
        self.direct_flag = direct_io_flag(scratch)
        # append and pop of a deque are atomic. One ring per thread that is ever inside at once.
        self._rings: deque[Ring] = deque()
        # Without O_DIRECT the kernel would do asynchronous transfers one after the other anyway.
        first = open_ring() if self.direct_flag else None
        if first is not None:
            self._rings.append(first)
        self._has_rings = first is not None

    def read(self, fds: Sequence[int], buffers: Sequence[Buffers]) -> Results:
        return self._move(os.preadv, Ring.read, fds, buffers)

    def write(self, fds: Sequence[int], buffers: Sequence[Buffers]) -> Results:
        return self._move(os.pwritev, Ring.write, fds, buffers)

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._rings.pop().close()

    def _move(
        self,
        one: Callable[[int, Buffers, int], int],
        many: Callable[[Ring, Sequence[int], Sequence[Buffers]], Results],
        fds: Sequence[int],
        buffers: Sequence[Buffers],
    ) -> Results:
        ring = self._borrow(buffers) if len(fds) > 1 else None
        if ring is None:
            return [_move_one(one, fd, views) for fd, views in zip(fds, buffers, strict=True)]
        try:
            results = many(ring, fds, buffers)
        except OSError as error:  # the ring is of no use any more, and nothing is known
            return [-(error.errno or errno.EIO)] * len(fds)
        self._rings.append(ring)
        for i, result in enumerate(results):
            if result in (-errno.EINVAL, -errno.EAGAIN):  # not aligned, or no slot: the plain way
                results[i] = _move_one(one, fds[i], buffers[i])
        return results

    def _borrow(self, buffers: Sequence[Buffers]) -> Ring | None:
        if not self._has_rings or any(view.readonly for views in buffers for view in views):
            return None
        try:
            return self._rings.pop()
        except IndexError:
            return open_ring()


def direct_io_flag(scratch: str) -> int:
    """O_DIRECT if the file system of `scratch` (a file to create and remove) takes it, else 0.

    Asked once, on a file of its own: a file system that refuses the flag at open() has by then
    created the file.
    """
    try:
        fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _O_DIRECT, 0o644)
        try:
            os.pwritev(fd, [mmap.mmap(-1, HEADER_BYTES)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        # A full disk has not refused the flag, and its objects can still be read.
        if error.errno not in (errno.EINVAL, errno.ENOSPC, errno.EDQUOT):
            raise
        return 0 if error.errno == errno.EINVAL else _O_DIRECT
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)
    return _O_DIRECT


def _move_one(transfer: Callable[[int, Buffers, int], int], fd: int, views: Buffers) -> int:
    try:
        try:
            return transfer(fd, views, 0)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _O_DIRECT:
                raise
            # The buffers are not aligned as this disk wants it (a page that is not from a host
            # pool, a device with larger blocks): the page cache takes any buffer.
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
            return transfer(fd, views, 0)
    except OSError as error:
        return -(error.errno or errno.EIO)
