"""The handshake over a blocking connection."""

from __future__ import annotations

import contextlib

from quire.peer.errors import PeerError
from quire.peer.handshake import MAX_FRAME_BYTES, Handshake
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
