"""Many direct reads or writes from one thread: Linux asynchronous I/O, through ctypes.

A page of a few hundred KiB takes the disk about as long as the interpreter needs to wake a thread
for it. One thread that has several transfers under way loads the disk as well as several threads
do, without their fight for the interpreter, which would also slow the engine's step.
Knows descriptors and buffers only. Where the kernel has no such calls, `open_ring` gives None.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
import threading
from collections.abc import Sequence

from quire.store.base import MAX_OBJECTS

# Not wrapped by libc. Numbers by machine: io_setup, io_destroy, io_getevents, io_submit.
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_PREADV, _PWRITEV = 7, 8
_MAX_BUFFERS = 3


_BUFFER = struct.Struct("<QQ")
"""struct iovec: address, length."""
_CONTROL = struct.Struct("<QIIHhIQQqQII")
"""struct iocb: data, key, flags, opcode, priority, descriptor, buffers, their number, offset, three
more."""
_EVENT = struct.Struct("<QQqq")
"""struct io_event: data, control, result, a second one."""


class Ring:
    """Up to MAX_OBJECTS transfers at a time. For one thread at a time; not to be used again once a
    call has raised."""

    def __init__(self, libc: ctypes.CDLL, numbers: tuple[int, int, int, int]) -> None:
        """Raises OSError when the kernel gives no context."""
        self._libc = libc
        _, self._destroy_no, self._wait_no, self._submit_no = numbers
        self._context = ctypes.c_ulong(0)
        if libc.syscall(numbers[0], MAX_OBJECTS, ctypes.byref(self._context)) != 0:
            raise OSError(ctypes.get_errno(), "io_setup")
        self._buffers = ctypes.create_string_buffer(MAX_OBJECTS * _MAX_BUFFERS * _BUFFER.size)
        self._controls = ctypes.create_string_buffer(MAX_OBJECTS * _CONTROL.size)
        self._events = ctypes.create_string_buffer(MAX_OBJECTS * _EVENT.size)
        first = ctypes.addressof(self._controls)
        self._pointers = (ctypes.c_uint64 * MAX_OBJECTS)(
            *range(first, first + len(self._controls), _CONTROL.size)
        )

    def read(self, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> list[int]:
        return self._move(_PREADV, fds, buffers)

    def write(self, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]) -> list[int]:
        return self._move(_PWRITEV, fds, buffers)

    def close(self) -> None:
        self._libc.syscall(self._destroy_no, self._context)

    def _move(
        self, opcode: int, fds: Sequence[int], buffers: Sequence[Sequence[memoryview]]
    ) -> list[int]:
        """Bytes moved per descriptor, from offset 0, or minus errno. Returns when all are done."""
        for i, (fd, views) in enumerate(zip(fds, buffers, strict=True)):
            self._fill(i, opcode, fd, views)
        results = [-errno.EIO] * len(fds)
        try:
            num_submitted = self._submit(len(fds), results)
            num_done = 0
            while num_done < num_submitted:
                num_done += self._wait(num_submitted - num_done, results)
        except BaseException:
            self._settle()
            raise
        return results

    def _settle(self) -> None:
        """Transfers may be under way of which nobody will hear. Return only when the kernel is
        done with their buffers, for the caller's pages will be somebody else's. The ring is of no
        use afterwards."""
        # Destroying the context cancels them or waits for them.
        while self._libc.syscall(self._destroy_no, self._context) != 0:
            if ctypes.get_errno() != errno.EINTR:
                _wait_for_ever()

    def _fill(self, i: int, opcode: int, fd: int, views: Sequence[memoryview]) -> None:
        at = i * _MAX_BUFFERS * _BUFFER.size
        for j, view in enumerate(views):
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            _BUFFER.pack_into(self._buffers, at + j * _BUFFER.size, address, view.nbytes)
        first, count = ctypes.addressof(self._buffers) + at, len(views)
        control = (i, 0, 0, opcode, 0, fd, first, count, 0, 0, 0, 0)
        _CONTROL.pack_into(self._controls, i * _CONTROL.size, *control)

    def _submit(self, count: int, results: list[int]) -> int:
        """How many are under way. The kernel may take fewer than offered, and refuses the first
        of the rest with an error, which is then that transfer's result."""
        first = accepted = 0
        while first < count:
            address = ctypes.addressof(self._pointers) + 8 * first
            taken = self._libc.syscall(
                self._submit_no,
                self._context,
                ctypes.c_long(count - first),
                ctypes.c_void_p(address),
            )
            if taken > 0:
                first += taken
                accepted += taken
            else:
                results[first] = -(ctypes.get_errno() or errno.EAGAIN)
                first += 1
        return accepted

    def _wait(self, count: int, results: list[int]) -> int:
        done: int = self._libc.syscall(
            self._wait_no,
            self._context,
            ctypes.c_long(count),
            ctypes.c_long(count),
            self._events,
            None,
        )
        if done < 0:
            if ctypes.get_errno() == errno.EINTR:
                return 0
            raise OSError(ctypes.get_errno(), "io_getevents")
        for i in range(done):
            which, _, result, _ = _EVENT.unpack_from(self._events, i * _EVENT.size)
            results[which] = result
        return done


def _wait_for_ever() -> None:
    """The kernel neither tells about the transfers nor ends them. A page that is never reported as
    done is never given to anybody else; a store that is stuck is one that is not asked again."""
    threading.Event().wait()


def open_ring() -> Ring | None:
    """None where this machine or container has no asynchronous I/O."""
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None or sys.maxsize < 2**32:
        return None
    try:
        return Ring(ctypes.CDLL(None, use_errno=True), numbers)
    except (OSError, AttributeError):
        return None
