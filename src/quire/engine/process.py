"""The engine process, `python -m quire.engine.process`; EngineClient starts it.

Reads its Startup from standard input, builds an Engine, and goes round until told to stop, or
until the server is gone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import traceback
from typing import NoReturn

import msgspec
import zmq

from quire import logs
from quire.child import read_startup, stop_when_orphaned
from quire.engine.engine import Engine
from quire.engine.messages import (
    EngineStartFailed,
    Started,
    Starting,
    StopEngine,
    ToEngine,
    ToServer,
    decode_to_engine,
    encode,
)
from quire.engine.startup import EngineStartup
from quire.errors import QuireError
from quire.garbage import spare_what_stands
from quire.peer.hub import PeerHub

_EXIT_START_FAILED = 2
_EXIT_BROKEN = 4
_EXIT_STOPPED = 5
_MAX_QUEUED_MESSAGES = 100_000


class ServerLine:
    """Our end of the line to the server."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, source: int | zmq.Socket[bytes]) -> None:
        """End a wait also when this becomes readable."""
        self._poller.register(source, zmq.POLLIN)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """What has come; waits up to `wait_s` for something."""
        if not self._poller.poll(int(wait_s * 1000)):
            return []
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                frame = self._socket.recv(zmq.NOBLOCK)
                # One bad message is the server's bug and concerns nobody else.
                with contextlib.suppress(msgspec.DecodeError):
                    messages.append(decode_to_engine(frame))
        return messages

    def send(self, message: ToServer) -> None:
        # A server that reads nothing of so much is hung: what it misses, it asked for.
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def serve(engine: Engine, line: ServerLine, stop: threading.Event) -> None:
    """The main loop. Raises RankLost, InvariantError: then nothing can be trusted any more."""
    worked = False
    if engine.exchange is not None and isinstance(engine.exchange.hub, PeerHub):
        line.watch(engine.exchange.hub.fileno())
    for source in engine.news:
        line.watch(source)
    while not stop.is_set():
        for message in line.receive(0.0 if worked else engine.patience_s()):
            if isinstance(message, StopEngine):
                return
            engine.handle(message)
        worked = engine.step()
        for answer in engine.take_messages():
            line.send(answer)


def main() -> int:
    logs.configure(logging.INFO)
    # Ctrl-C reaches the whole process group; the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    stop = threading.Event()
    faulthandler.enable()  # where every thread was, should a library crash
    startup, parent = read_startup(EngineStartup)
    stop_when_orphaned(parent, stop, startup.address)
    line = ServerLine(startup.address)
    try:
        return _build_and_serve(startup, line, stop)
    finally:
        stop.set()
        line.close()


def _leave(*_: object) -> NoReturn:
    """Told to stop before there is a loop that could: unwind, so that nothing is left behind."""
    sys.exit(_EXIT_STOPPED)


def _build_and_serve(startup: EngineStartup, line: ServerLine, stop: threading.Event) -> int:
    from quire.engine.build import build_engine

    try:
        engine = build_engine(startup.config, lambda what, done: line.send(Starting(what, done)))
    except Exception as error:  # process boundary: the server turns this into an EngineError
        # The server, told why, ends us: that we leave already must not be said twice.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        known = isinstance(error, QuireError)
        if not known:
            traceback.print_exc()
        line.send(EngineStartFailed(str(error) if known else f"{type(error).__name__}: {error}"))
        return _EXIT_START_FAILED
    try:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        spare_what_stands()
        line.send(Started(engine.info))
        serve(engine, line, stop)
    except Exception:  # process boundary: the exit code tells the server
        traceback.print_exc()
        return _EXIT_BROKEN
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
