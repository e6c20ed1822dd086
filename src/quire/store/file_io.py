"""Moving one object between a file and its buffers: direct I/O, vectored, no copy.

Knows files and buffers; nothing of names, budgets or checksums.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from quire.store.base import HEADER_BYTES, Blob
from quire.types import PageStatus

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class ShortWriteError(OSError):
    """The kernel took fewer bytes than offered, which for a file means that the disk is full."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "short write")


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


def read_object(fd: int, size_bytes: int, blob: Blob) -> PageStatus:
    """OK when the file is exactly as long as the blob and was read whole, else CORRUPT.

    Of a file of another length the header is still read: it may tell whose it is.
    """
    expected = blob.header.nbytes + blob.payload.nbytes
    if size_bytes == expected and _move(os.preadv, fd, (blob.header, blob.payload)) == expected:
        return PageStatus.OK
    if size_bytes >= blob.header.nbytes:
        _move(os.preadv, fd, (blob.header,))
    return PageStatus.CORRUPT


def write_object(fd: int, blob: Blob) -> None:
    if _move(os.pwritev, fd, (blob.header, blob.payload)) != (
        blob.header.nbytes + blob.payload.nbytes
    ):
        raise ShortWriteError


def _move(
    transfer: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
) -> int:
    try:
        return transfer(fd, buffers, 0)
    except OSError as error:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & _O_DIRECT:
            raise
        # The buffers are not aligned as this disk wants it (a page that is not from a host
        # pool, a device with larger blocks): the page cache takes any buffer.
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
        return transfer(fd, buffers, 0)
