"""SocketConnection: a stream of bytes over a connected socket, TCP's or a Unix socket; and who
listens for them.

The sockets block, and the kernel does the waiting: one call fills a whole page and gives up by
itself (SO_RCVTIMEO, SO_SNDTIMEO), where Python's own timeouts would wake up for every few packets.
Buffers are left to the system, which widens them as needed: a size of our own would be cut to
net.core.rmem_max, mostly far below that, and was no faster where it was not. Under TLS it is
Python's timeouts after all, in slices.

Knows how to wait; not how to connect.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence

from quire.peer.errors import PeerError, ReadCancelled
from quire.peer.transport import Cancelled
from quire.peer.wire import LENGTH, frame_length, framed

_MAX_VIEWS = 512  # per call; the system's limit is 1024
_SLICE_S = 0.2
"""Longest wait in one call: how late a cancellation may be noticed."""
_LONGEST_S = 30.0
_SECURE_BYTES = 256 << 10
"""Encrypted in one call."""
_TIMEVAL = struct.Struct("@ll")


class SocketConnection:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_secure = False
        self._deadline = math.inf
        self._cancelled: Cancelled | None = None
        sock.setblocking(True)

    def set_deadline(self, deadline: float, cancelled: Cancelled | None = None) -> None:
        self._deadline = deadline
        self._cancelled = cancelled

    def send_frame(self, content: bytes) -> None:
        self.send_views([memoryview(framed(content))])

    def recv_frame(self, max_bytes: int) -> bytes:
        prefix = bytearray(LENGTH.size)
        self._fill(memoryview(prefix))
        content = bytearray(frame_length(bytes(prefix), max_bytes))
        self._fill(memoryview(content))
        return bytes(content)

    @property
    def is_local(self) -> bool:
        if self._socket.family is socket.AF_UNIX:
            return True
        try:
            ends = self._socket.getpeername()[0], self._socket.getsockname()[0]
        except OSError:  # it is gone already
            return False
        return all(ipaddress.ip_address(end.partition("%")[0]).is_loopback for end in ends)

    def secure(self, context: ssl.SSLContext, *, is_server: bool) -> bytes | None:
        self.check_time()
        self._socket.settimeout(max(0.001, min(self._deadline - time.monotonic(), _LONGEST_S)))
        secured = context.wrap_socket(
            self._socket, server_side=is_server, do_handshake_on_connect=False
        )
        self._socket = secured  # before it waits: what was wrapped cannot be interrupted any more
        secured.do_handshake()
        self._is_secure = True
        secured.settimeout(_SLICE_S)
        return secured.getpeercert(binary_form=True)

    def send_views(self, views: Sequence[memoryview]) -> None:
        if self._is_secure:
            for view in views:
                self._send_secure(view)
            return
        waiting = list(views)
        while waiting:
            self._wait_at_most(socket.SO_SNDTIMEO)
            try:
                sent = self._socket.sendmsg(waiting[:_MAX_VIEWS])
            except BlockingIOError:  # a slice of waiting is over
                continue
            done = 0
            while done < len(waiting) and sent >= waiting[done].nbytes:
                sent -= waiting[done].nbytes
                done += 1
            del waiting[:done]
            if sent:
                waiting[0] = waiting[0][sent:]

    def recv_into_views(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._fill(view)

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Of a Unix socket: the other side gets them too."""
        self._wait_at_most(socket.SO_SNDTIMEO)
        socket.send_fds(self._socket, [b"d"], list(descriptors))

    def recv_descriptors(self, count: int) -> list[int]:
        """The caller's to close. Raises PeerError if there are not as many."""
        size = socket.CMSG_SPACE(count * array.array("i").itemsize)
        while True:
            self._wait_at_most(socket.SO_RCVTIMEO)
            try:
                data, found, flags, _ = self._socket.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
                break
            except BlockingIOError:  # a slice of waiting is over
                continue
        if not data:
            raise EOFError("the connection was closed")
        descriptors = array.array("i")
        for level, kind, content in found:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) - len(content) % 4])
        if flags & socket.MSG_CTRUNC or len(descriptors) != count:
            for descriptor in descriptors:
                os.close(descriptor)
            raise PeerError("the other side does not keep to the protocol")
        return list(descriptors)

    def is_stale(self) -> bool:
        try:  # not as TLS has it, which knows no such flags
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def interrupt(self) -> None:
        # Not as TLS has it: a thread that waits in it would go on without, and read what it finds.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        self._socket.close()

    def _send_secure(self, view: memoryview) -> None:
        while view.nbytes:
            self.check_time()
            try:
                sent = self._socket.send(view[:_SECURE_BYTES])
            except TimeoutError:  # a slice of waiting is over: the same again
                continue
            view = view[sent:]

    def _fill_secure(self, view: memoryview) -> None:
        while view.nbytes:
            self.check_time()
            try:
                received = self._socket.recv_into(view)
            except TimeoutError:
                continue
            if not received:
                raise EOFError("the connection was closed")
            view = view[received:]

    def _fill(self, view: memoryview) -> None:
        if self._is_secure:
            self._fill_secure(view)
            return
        while view.nbytes:
            self._wait_at_most(socket.SO_RCVTIMEO)
            try:
                received = self._socket.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not received:
                raise EOFError("the connection was closed")
            view = view[received:]

    def check_time(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("past the deadline")
        if self._cancelled is not None and self._cancelled():
            raise ReadCancelled("cancelled")
        return left_s

    def _wait_at_most(self, option: int) -> None:
        """Until the next slice is over, or the deadline. Raises if it is already."""
        seconds = min(self.check_time(), _SLICE_S)
        # All zero would mean: for ever.
        micros = max(1, int(seconds * 1e6))
        self._socket.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        )


class SocketListener:
    """As of Listener, on a socket that listens already. `connected`: what becomes of one that has
    come; raises OSError for one that comes to nothing."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        connected: Callable[[socket.socket], SocketConnection],
    ) -> None:
        self.address = address
        self._socket = sock
        self._connected = connected
        self._closed = False

    def accept(self) -> SocketConnection | None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            if self._closed:
                return None
            raise
        return self._connected(sock)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()
