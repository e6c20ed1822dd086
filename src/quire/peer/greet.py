"""The handshake over a blocking connection, and what makes the connection safe after it."""

from __future__ import annotations

import contextlib
import hmac

from quire.peer.errors import PeerError
from quire.peer.handshake import MAX_FRAME_BYTES, Handshake, Side
from quire.peer.tls import check_certificate, tls_context
from quire.peer.transport import Connection


def shake_hands(connection: Connection, handshake: Handshake, *, dials: bool) -> None:
    """Raises PeerError when either side refuses; TimeoutError, EOFError, OSError.

    The connection's deadline is the caller's to set; it is also the caller's to close.
    """
    if dials:
        connection.send_frame(handshake.start())
    try:
        while not handshake.done:
            answer = handshake.feed(connection.recv_frame(MAX_FRAME_BYTES))
            if answer:
                connection.send_frame(answer)
    except PeerError as error:
        if error.reply:
            with contextlib.suppress(OSError, PeerError):
                connection.send_frame(error.reply)
        raise
    if handshake.encrypts:
        context = tls_context(handshake.secret, is_server=not dials)
        check_certificate(handshake.secret, connection.secure(context, is_server=not dials))
        _seal(connection, handshake, dials=dials)


def _seal(connection: Connection, handshake: Handshake, *, dials: bool) -> None:
    if dials:
        connection.send_frame(handshake.seal(Side.DIALER))
    theirs = Side.LISTENER if dials else Side.DIALER
    check_seal(handshake, theirs, connection.recv_frame(MAX_FRAME_BYTES))
    if not dials:
        connection.send_frame(handshake.seal(Side.LISTENER))


def check_seal(handshake: Handshake, theirs: Side, seal: bytes) -> None:
    """Raises PeerError."""
    if not hmac.compare_digest(handshake.seal(theirs), seal):
        raise PeerError("the other side is not the one that shook hands")
