"""Memory that another process on this machine may read where it is: memfd, sealed.

Knows descriptors and mappings; not what lies in them, nor how a descriptor travels. Seals see to
it that nobody but its owner writes, and that it never shrinks under a reader, who would die of it.

    owner    created ──▶ mapped to write ──▶ sealed ──▶ descriptor goes to readers
    reader   descriptor ──▶ seals checked ──▶ mapped to read; lives on if the owner dies
"""

from __future__ import annotations

import fcntl
import mmap
import os

_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, since Linux 5.1: mappings to write that there are stay, and no others
come. Python's fcntl does not name it everywhere."""
_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEALS = _NEEDED | _FUTURE_WRITE | fcntl.F_SEAL_SEAL


class NotShareable(OSError):
    """Memory cannot be shared here, or what was shared cannot be trusted."""


def create_shared(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A descriptor for readers, and the only mapping that can write. Raises NotShareable where the
    system has no such memory; OSError, ValueError, OverflowError when there is not enough of it."""
    try:
        descriptor = os.memfd_create("quire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        raise NotShareable(f"this system has no memory to share ({error})") from error
    try:
        os.ftruncate(descriptor, size_bytes)
        mapping = mmap.mmap(descriptor, size_bytes)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise NotShareable(f"shared memory cannot be sealed here ({error})") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapping


def map_shared(descriptor: int, size_bytes: int) -> mmap.mmap:
    """To read what another process has created. The descriptor stays the caller's. Raises
    NotShareable for one that could shrink, or is too small; OSError."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise NotShareable("what was passed is no sealed memory") from error
    if seals & _NEEDED != _NEEDED:
        raise NotShareable("the memory that was passed could change its size")
    if not 0 < size_bytes <= os.fstat(descriptor).st_size:
        raise NotShareable("the memory that was passed is smaller than was said")
    return mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ)
