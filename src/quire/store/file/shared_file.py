"""A small file that all processes on a store read and change, one at a time. Knows no content.

flock keeps processes apart, on any host, and is given back by the kernel when one dies; a lock of
this process keeps its threads apart, since they share the descriptor. If somebody has removed the
file, whoever locks it next goes on with the one that is there by then, or makes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOOKS = 8
"""At a file that is removed again and again."""


class SharedFile:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path = path
        self._fd: int | None = self._open()
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
                self._lock(fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
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

    def _lock(self, how: int) -> None:
        fcntl.flock(self.fd, how)
        for _ in range(_LOOKS):
            if self._is_there():
                break
            # In place, since others may be reading; the lock of the one that is gone goes with it.
            try:
                fresh = self._open()
            except OSError:  # no folder either; others may still have the one that is gone
                fcntl.flock(self.fd, fcntl.LOCK_UN)
                raise
            os.dup2(fresh, self.fd, inheritable=False)
            os.close(fresh)
            fcntl.flock(self.fd, how)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
