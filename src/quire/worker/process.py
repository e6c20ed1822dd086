"""The worker's side of a worker process, `python -m quire.worker.process`; RemoteWorkers starts it.

Reads its `Startup` from standard input, connects, builds a CacheWorker and serves until told to
stop, or until the leader is gone: the leader holds the other end of standard input and never
writes to it again, so end-of-file means that it died, however it died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import zmq

from quire.errors import QuireError
from quire.messages import Command, Completion
from quire.worker import wire
from quire.worker.config import build_worker

if TYPE_CHECKING:
    from quire.worker.worker import CacheWorker

_BUSY_POLL_MS = 1
_IDLE_POLL_MS = 50
_ORPHAN_GRACE_S = 5.0
_EXIT_START_FAILED = 2
_EXIT_ORPHAN = 3


Handler = Callable[[bytes], bytes | None]
"""Takes a parcel; what it returns is sent back."""


class Worker(Protocol):
    """The part of CacheWorker that serving needs."""

    @property
    def busy(self) -> bool: ...

    def submit(self, commands: list[Command]) -> None: ...

    def poll(self) -> list[Completion]: ...


def serve(
    worker: Worker,
    socket: zmq.Socket[bytes],
    stop: threading.Event,
    *,
    heartbeat_s: float,
    handle: Handler | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Commands in, completions out, a heartbeat now and then, until Shutdown or `stop`.

    Also what an engine's own rank process runs: `handle` then runs the model, on this thread.
    """
    unsent: list[Completion] = []
    next_heartbeat = clock()
    while not stop.is_set():
        socket.poll(_BUSY_POLL_MS if worker.busy or unsent else _IDLE_POLL_MS)
        for message in _received(socket):
            match message:
                case wire.Shutdown():
                    return
                case wire.Work(commands=commands):
                    worker.submit(commands)
                case wire.Parcel(data=data):
                    reply = handle(data) if handle is not None else None
                    if reply is not None:
                        socket.send(wire.encode(wire.Parcel(reply)))
        # A leader that does not read fills the queue; completions then wait here, and their
        # number is bounded by the operations the leader itself started.
        unsent += worker.poll()
        if unsent and _send(socket, wire.Report(unsent)):
            unsent = []
        if clock() >= next_heartbeat:
            _send(socket, wire.Heartbeat())
            next_heartbeat = clock() + heartbeat_s


def _received(socket: zmq.Socket[bytes]) -> list[wire.ToWorker]:
    messages = []
    with contextlib.suppress(zmq.Again):
        while True:
            frames = socket.recv_multipart(zmq.NOBLOCK)
            message = wire.decode_to_worker(frames[0]) if len(frames) == 1 else None
            if message is not None:
                messages.append(message)
    return messages


def _send(socket: zmq.Socket[bytes], message: wire.ToLeader) -> bool:
    try:
        socket.send(wire.encode(message), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _read_startup(stream: BinaryIO) -> wire.Startup:
    size = int.from_bytes(_read_exactly(stream, 4), "little")
    if not 0 < size <= wire.MAX_STARTUP_BYTES:
        raise QuireError("a worker process is started by RemoteWorkers, not by hand")
    return wire.decode_startup(_read_exactly(stream, size))


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := stream.read(size - len(data))):
        data += piece
    return data


def _watch_leader(stream: BinaryIO, stop: threading.Event, address: str) -> None:
    """Runs on a thread: when the leader is gone, stop; if that takes too long, exit anyway."""
    with contextlib.suppress(OSError):
        while stream.read(1):
            pass
    if stop.is_set():
        return
    stop.set()
    _remove_socket(address)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(_EXIT_ORPHAN)


def _remove_socket(address: str) -> None:
    """The leader can no longer tidy up after itself; the last child to leave finds it done."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


@dataclass(frozen=True, slots=True)
class Duties:
    """What a process does beside being a worker."""

    handle: Handler | None = None
    close: Callable[[], None] = lambda: None


Start = Callable[[wire.Startup], "tuple[CacheWorker, Duties]"]


def start_worker(startup: wire.Startup) -> tuple[CacheWorker, Duties]:
    return build_worker(startup.config), Duties()


def main(start: Start = start_worker) -> int:
    # Ctrl-C reaches the whole process group; the leader decides when workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stdin = os.fdopen(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    startup = _read_startup(stdin)
    threading.Thread(
        target=_watch_leader, args=(stdin, stop, startup.address), name="quire-watch", daemon=True
    ).start()

    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, startup.identity)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(startup.address)
    try:
        return _build_and_serve(start, startup, socket, stop)
    finally:
        stop.set()
        socket.close()
        context.term()


def _build_and_serve(
    start: Start, startup: wire.Startup, socket: zmq.Socket[bytes], stop: threading.Event
) -> int:
    try:
        worker, duties = start(startup)
    except Exception as error:  # process boundary: the leader turns this into a WorkerError
        sentence = (
            str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        )
        socket.send(wire.encode(wire.StartFailed(sentence)))
        return _EXIT_START_FAILED
    try:
        socket.send(wire.encode(wire.Ready(startup.config.rank)))
        serve(worker, socket, stop, heartbeat_s=startup.heartbeat_s, handle=duties.handle)
    finally:
        duties.close()
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
