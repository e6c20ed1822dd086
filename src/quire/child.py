"""A child process that is told how to start, and that never outlives its parent.

Its start is a length and a msgpack message on standard input. The parent keeps its end of the pipe
open and never writes again, so end-of-file there means that the parent is gone, however it went.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from quire.decoders import msgpack_decoder
from quire.errors import QuireError

_MAX_STARTUP_BYTES = 1 << 20
_ORPHAN_GRACE_S = 30.0
"""Longer than an engine waits for its ranks when it ends: else it would leave them, and the socket
that it made for them, as they are."""
_EXIT_ORPHAN = 3

Message = TypeVar("Message", bound=msgspec.Struct)


def send_startup(process: subprocess.Popen[bytes], startup: msgspec.Struct) -> None:
    assert process.stdin is not None
    data = msgspec.msgpack.encode(startup)
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever watches it says so
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        process.stdin.flush()


def read_startup(kind: type[Message]) -> tuple[Message, BinaryIO]:
    """The message, and the pipe to watch. Raises QuireError for a process started by hand."""
    stream = os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    size = int.from_bytes(_read_exactly(stream, 4), "little")
    if not 0 < size <= _MAX_STARTUP_BYTES:
        raise QuireError("this process is started by Quire, not by hand")
    return msgpack_decoder(kind).decode(_read_exactly(stream, size)), stream


def stop_when_orphaned(stream: BinaryIO, stop: threading.Event, address: str) -> None:
    """Set `stop` when the parent is gone, and remove the socket that it made at `address`, also
    when it had told us to stop before; if stopping takes too long then, exit anyway."""

    def leave() -> bool:
        was_told = stop.is_set()
        stop.set()
        _remove_socket(address)
        return not was_told

    when_orphaned(stream.fileno(), leave, _ORPHAN_GRACE_S)


def when_orphaned(pipe: int, leave: Callable[[], bool], grace_s: float) -> None:
    """Call `leave` when the other end of the pipe is closed: whoever held it is gone, however it
    went. If that says that it is hurried, the process ends after so long, whether it is done or
    not. The one way in which a process of ours never outlives its parent."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(pipe, 4096):
                pass
        if leave():
            time.sleep(grace_s)
            os._exit(_EXIT_ORPHAN)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


def _remove_socket(address: str) -> None:
    """The parent can no longer tidy up after itself; the last child to leave finds it done."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := stream.read(size - len(data))):
        data += piece
    return data
