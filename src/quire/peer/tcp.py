"""TCP: listening, dialling, and the options of its sockets. What goes over them is sockets.py's."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from quire.errors import ConfigError
from quire.peer.address import join_address, split_address
from quire.peer.sockets import SocketConnection, SocketListener

_BACKLOG = 128
_DEAD_LINK_S = 30


class TcpTransport:
    def __init__(self, lookup: Callable[..., Any] = socket.getaddrinfo) -> None:
        """`lookup`: of names, at every dial."""
        self._lookup = lookup

    def listen(self, address: str) -> SocketListener:
        listener = listening_socket(address)
        return SocketListener(listener, bound_address(listener), _connection)

    def dial(self, address: str, deadline: float) -> SocketConnection:
        _, host, port = split_address(address)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("past the deadline")
        error: OSError = OSError("no address")
        for family, kind, _, _, where in self._lookup(host, port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind)
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(where)
                return _connection(sock)
            except OSError as reason:
                sock.close()
                error = reason
        raise error


def _connection(sock: socket.socket) -> SocketConnection:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Not everywhere; where they are missing the system's own, slower, rules hold.
        with contextlib.suppress(AttributeError, OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_LINK_S // 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_LINK_S // 6)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        return SocketConnection(sock)
    except OSError:
        sock.close()
        raise


def listening_socket(address: str) -> socket.socket:
    """Raises ConfigError."""
    _, host, port = split_address(address)
    listener = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Named, for asyncio sets TCP_NODELAY only then.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen on {address} ({error.strerror or error}): "
            "choose another peer_host or peer_port"
        ) from error
    return listener


def bound_address(listener: socket.socket) -> str:
    """Where it really listens, if it was to be any free port."""
    host, port = listener.getsockname()[:2]
    return join_address("tcp", host, port)
