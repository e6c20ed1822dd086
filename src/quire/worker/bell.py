"""Bell: any thread rings it; whoever sleeps on its descriptor wakes up."""

from __future__ import annotations

import contextlib
import os
import weakref


class Bell:
    def __init__(self) -> None:
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # With its last user, a thread that hangs among them: the number may not be another's then.
        weakref.finalize(self, os.close, self._eventfd)

    def fileno(self) -> int:
        """Readable from `ring` to `hush`."""
        return self._eventfd

    def ring(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it did not ring
            os.eventfd_read(self._eventfd)
