"""A small file that all processes on a store read and change, one at a time. Knows no content.

flock keeps processes apart, on any host, and is given back by the kernel when one dies; a lock of
this process keeps its threads apart, since they share the descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedFile:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._mutex = threading.Lock()

    @property
    def fd(self) -> int:
        """Raises OSError once closed: the number may by then be somebody else's."""
        if self._fd is None:
            raise OSError(errno.EBADF, "the store is closed")
        return self._fd

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Nobody else is inside. Without `wait`, for work that takes long: False at once when
        somebody is."""
        if not self._mutex.acquire(blocking=wait):
            yield False
            return
        try:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def close(self) -> None:
        with self._mutex:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
