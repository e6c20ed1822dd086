"""Frames: four bytes of length, little-endian, then the content. Knows no sockets."""

from __future__ import annotations

import struct

from quire.peer.errors import PeerError

LENGTH = struct.Struct("<I")


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def frame_length(prefix: bytes, max_bytes: int) -> int:
    """Checked before anything is allocated. Raises PeerError."""
    (size,) = LENGTH.unpack(prefix)
    if not 0 < size <= max_bytes:
        raise PeerError("the other side does not keep to the protocol")
    return int(size)
