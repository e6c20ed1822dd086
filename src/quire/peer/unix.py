"""Unix sockets: how a page server is reached by readers on its own machine.

The name is an abstract one: it is gone when the process is, however that ends. It follows from the
secret, the engine's life and the page server's TCP address, so that whoever may read can find it
and nobody else can guess it; who cannot connect is on another machine, or in another network
namespace. Both ends belong to one user: the other side's is asked of the system.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

from quire.errors import ConfigError
from quire.peer.address import split_address
from quire.peer.errors import PeerError
from quire.peer.sockets import SocketConnection, SocketListener

SCHEME = "unix:"
_BACKLOG = 128
_NAME_CHARS = 32
_CREDENTIALS = struct.Struct("@iII")  # process, user, group


def near_address(secret: str, epoch: str, address: str) -> str:
    """Where the page server of this life that listens on `address` is found on its own machine.
    Raises ConfigError for what is no address."""
    _, _, port = split_address(address)
    proof = hmac.new(secret.encode(), f"near {epoch} {port}".encode(), hashlib.sha256)
    return f"{SCHEME}quire-{proof.hexdigest()[:_NAME_CHARS]}"


def is_near(address: str) -> bool:
    return address.startswith(SCHEME)


def listen_near(address: str) -> SocketListener:
    """Raises ConfigError when it cannot."""
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_name(address))
        listener.listen(_BACKLOG)
    except (OSError, AttributeError) as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"cannot listen for readers on this machine ({error}): set peer_transport to tcp"
        ) from error
    return SocketListener(listener, address, _connection)


def dial_near(address: str, deadline: float) -> SocketConnection:
    """Raises TimeoutError, OSError, PeerError."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("past the deadline")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(left_s)
        sock.connect(_name(address))
    except OSError:
        sock.close()
        raise
    return _connection(sock)


def can_reach(address: str) -> bool:
    """Is somebody there, on this machine?"""
    try:
        dial_near(address, time.monotonic() + 1.0).close()
    except (OSError, PeerError):
        return False
    return True


def _name(address: str) -> str:
    return "\0" + address.removeprefix(SCHEME)


def _connection(sock: socket.socket) -> SocketConnection:
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(found)
        if user != os.geteuid():
            raise PermissionError("the other side belongs to another user")
        return SocketConnection(sock)
    except OSError:
        sock.close()
        raise
