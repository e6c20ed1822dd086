"""How an engine's processes are started: a length and a msgpack message on standard input.

The parent keeps its end of the pipe open and never writes again, so end-of-file there means that
the parent is gone, however it went: the child then ends too.
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

from quire.engine.config import EngineConfig
from quire.errors import EngineError

_MAX_STARTUP_BYTES = 1 << 20
_ORPHAN_GRACE_S = 5.0
_EXIT_ORPHAN = 3

Message = TypeVar("Message", bound=msgspec.Struct)


def model_environment() -> dict[str, str]:
    """The environment of a process that computes on CPU threads.

    OpenMP's threads spin while they wait for each other; whenever anything else wants a core (our
    own copies and I/O, another process) that costs up to ten times the computation. A person who
    has set the policy knows better.
    """
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", **os.environ}


class Startup(msgspec.Struct, frozen=True):
    """Of an engine process."""

    address: str
    config: EngineConfig


def send_startup(process: subprocess.Popen[bytes], startup: msgspec.Struct) -> None:
    assert process.stdin is not None
    data = msgspec.msgpack.encode(startup)
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever watches it says so
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        process.stdin.flush()


def read_startup(kind: type[Message]) -> tuple[Message, BinaryIO]:
    """The message, and the pipe to watch."""
    stream = os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    size = int.from_bytes(_read_exactly(stream, 4), "little")
    if not 0 < size <= _MAX_STARTUP_BYTES:
        raise EngineError("this process is started by `quire serve`, not by hand")
    return msgspec.msgpack.decode(_read_exactly(stream, size), type=kind), stream


def on_orphaned(stream: BinaryIO, stop: Callable[[], None]) -> None:
    """When the parent is gone call `stop`, from another thread; if that is not enough, exit."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while stream.read(1):
                pass
        stop()
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(_EXIT_ORPHAN)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


def remove_socket(address: str) -> None:
    """Tidy up after a parent that no longer can: its socket, and the folder it made for it."""
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
