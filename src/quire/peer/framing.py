"""Small things about the streams between leaders: frames, an end, a reason."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from quire.peer.handshake import MAX_FRAME_BYTES, TIMEOUT_S
from quire.peer.wire import LENGTH, frame_length

_LAST_WORDS_S = 1.0


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Raises EOFError, PeerError."""
    size = frame_length(await reader.readexactly(LENGTH.size), max_bytes)
    return await reader.readexactly(size)


class _Over(asyncio.StreamReaderProtocol):
    """Of a stream over another one, which lives as long: who lets go of it closes both."""

    def __init__(self, reader: asyncio.StreamReader, under: asyncio.StreamWriter) -> None:
        super().__init__(reader)
        self.under = under


async def secured(
    writer: asyncio.StreamWriter, context: ssl.SSLContext, *, is_server: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """What is said from here on is encrypted. Nothing may have been read of it yet: see
    `pause_reading`."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_FRAME_BYTES)
    protocol = _Over(reader, writer)
    transport = await loop.start_tls(
        writer.transport, protocol, context, server_side=is_server, ssl_handshake_timeout=TIMEOUT_S
    )
    assert transport is not None
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def close_stream(writer: asyncio.StreamWriter) -> None:
    """Say what is left to say, but not for long."""
    writer.close()
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def why_failed(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    return str(error)
