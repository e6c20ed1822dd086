"""Small things about the streams between leaders: frames, an end, a reason."""

from __future__ import annotations

import asyncio
import os
import socket

from quire.peer.wire import LENGTH, frame_length

_LAST_WORDS_S = 1.0


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Raises EOFError, PeerError."""
    size = frame_length(await reader.readexactly(LENGTH.size), max_bytes)
    return await reader.readexactly(size)


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
