"""Transports: how the bytes of pages travel, found by the scheme of an address.

A scheme is registered in the entry-point group `quire.transports` as a function that takes nothing
and returns a `Transport`; `tcp` is always there. Knows nothing of any particular transport.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Protocol

from quire.errors import ConfigError
from quire.peer.address import split_address

GROUP = "quire.transports"
_BUILT_IN = "tcp"

Cancelled = Callable[[], bool]


class Connection(Protocol):
    """A stream of bytes in both directions. One thread at a time uses it; any may interrupt() it.

    Whatever waits raises TimeoutError past the deadline, ReadCancelled, EOFError when the other
    side has closed, PeerError for a frame that is too long, OSError. After any of these the
    connection is of no more use than to be closed.
    """

    def set_deadline(self, deadline: float, cancelled: Cancelled | None = None) -> None:
        """For all that follows: when (time.monotonic) to give up waiting, and a question that is
        asked several times a second while waiting."""

    def check_time(self) -> float:
        """Seconds left. Raises TimeoutError, ReadCancelled, as whatever waits does."""

    def send_frame(self, content: bytes) -> None: ...

    def recv_frame(self, max_bytes: int) -> bytes: ...

    def send_views(self, views: Sequence[memoryview]) -> None:
        """All of them, one after the other, from where they are."""

    def recv_into_views(self, views: Sequence[memoryview]) -> None:
        """Fill them, one after the other."""

    @property
    def is_local(self) -> bool:
        """Are both its ends on this machine, so that nobody on a network can read or change it?"""

    def secure(self, context: ssl.SSLContext, *, is_server: bool) -> bytes | None:
        """From here on it is encrypted. The certificate that the other side has shown, as DER."""

    def is_stale(self) -> bool:
        """While nothing is expected: has the other side closed, or spoken out of turn?"""

    def interrupt(self) -> None:
        """End it: a thread that waits in it wakes up with an error. Still to be closed."""

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where it really listens."""

    def accept(self) -> Connection | None:
        """The next connection; None when closed. Raises OSError for one that came to nothing."""

    def close(self) -> None: ...


class Transport(Protocol):
    def listen(self, address: str) -> Listener:
        """Raises ConfigError when it cannot."""

    def dial(self, address: str, deadline: float) -> Connection:
        """Raises TimeoutError, OSError."""


def open_transport(address: str) -> Transport:
    """The transport of an address. Raises ConfigError, which names those there are."""
    scheme, _, _ = split_address(address)
    if scheme == _BUILT_IN:
        from quire.peer.tcp import TcpTransport

        return TcpTransport()
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in known:
        names = ", ".join(sorted({_BUILT_IN, *known}))
        raise ConfigError(
            f"unknown transport {scheme!r} in {address!r}: known transports are {names}"
        )
    try:
        make: Callable[[], Transport] = known[scheme].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the plug-in for {scheme!r} addresses cannot be loaded ({error}): "
            "install what it needs"
        ) from error
    return make()
