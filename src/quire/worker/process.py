"""The worker's side of a worker process, `python -m quire.worker.process`; RemoteWorkers starts it.

Reads its `Startup` from standard input, connects, builds a CacheWorker and serves until told to
stop, or until the leader is gone: the leader holds the other end of standard input and never
writes to it again, so end-of-file means that it died, however it died.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from quire.child import read_startup, stop_when_orphaned
from quire.errors import QuireError
from quire.garbage import spare_what_stands
from quire.messages import Completion
from quire.worker import wire
from quire.worker.config import build_worker

if TYPE_CHECKING:
    from quire.worker.worker import CacheWorker

_BUSY_POLL_MS = 1
_IDLE_POLL_MS = 50
_EXIT_START_FAILED = 2


Handler = Callable[[bytes], bytes | None]
"""Takes a parcel; what it returns is sent back."""


def serve(
    worker: CacheWorker,
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
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(worker.fileno(), zmq.POLLIN)
    next_heartbeat = clock()
    while not stop.is_set():
        poller.poll(_BUSY_POLL_MS if worker.is_copying or unsent else _IDLE_POLL_MS)
        for message in _received(socket):
            match message:
                case wire.Shutdown():
                    return
                case wire.StepCommands(commands=commands):
                    worker.submit(commands)
                case wire.Parcel(data=data):
                    reply = handle(data) if handle is not None else None
                    if reply is not None:
                        socket.send(wire.encode(wire.Parcel(reply)))
        # A leader that does not read fills the queue; completions then wait here, and their
        # number is bounded by the operations the leader itself started.
        unsent += worker.poll()
        is_due = clock() >= next_heartbeat
        store = worker.store_account() if is_due else None
        if (unsent or is_due) and _send(socket, wire.Report(unsent, worker.peer_counters(), store)):
            unsent = []
            if is_due:
                next_heartbeat = clock() + heartbeat_s


def _received(socket: zmq.Socket[bytes]) -> list[wire.ToWorker]:
    messages = []
    with contextlib.suppress(zmq.Again):
        while True:
            frames = socket.recv_multipart(zmq.NOBLOCK)
            message = wire.decode(wire.to_worker, frames[0]) if len(frames) == 1 else None
            if message is not None:
                messages.append(message)
    return messages


def _send(socket: zmq.Socket[bytes], message: wire.ToLeader) -> bool:
    try:
        socket.send(wire.encode(message), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


_Start = Callable[[wire.Startup], "tuple[CacheWorker, Handler | None]"]
"""Builds what runs here: a worker, and what to do with parcels."""


def start_worker(startup: wire.Startup) -> tuple[CacheWorker, Handler | None]:
    return build_worker(startup.config), None


def main(start: _Start = start_worker) -> int:
    # Ctrl-C reaches the whole process group; the leader decides when workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    startup, leader = read_startup(wire.Startup)
    stop_when_orphaned(leader, stop, startup.address)

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
    start: _Start, startup: wire.Startup, socket: zmq.Socket[bytes], stop: threading.Event
) -> int:
    try:
        worker, handle = start(startup)
    except Exception as error:  # process boundary: the leader turns this into a WorkerError
        sentence = (
            str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        )
        socket.send(wire.encode(wire.StartFailed(sentence)))
        return _EXIT_START_FAILED
    try:
        spare_what_stands()
        socket.send(wire.encode(wire.Ready(startup.config.rank, worker.peer_address)))
        serve(worker, socket, stop, heartbeat_s=startup.heartbeat_s, handle=handle)
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
