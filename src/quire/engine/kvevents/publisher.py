"""EventPublisher: the cache's events on a ZeroMQ socket, numbered, and again for who missed some.

    engine ──publish──▶ queue ──▶ PUB      topic, number, batch
                                  ROUTER ◀── number ; then every batch from there on that is kept,
                                             each as it was sent; the last: no topic, −1, empty

Numbers are 8 bytes, big-endian, from 0 without gaps. Publishing never waits: who is too slow misses
batches, sees it by their numbers, and asks. One thread has both sockets.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from quire.engine.kvevents.config import Publishing
from quire.engine.kvevents.format import AllBlocksCleared, KvEvent, KvEventBatch, told
from quire.errors import ConfigError
from quire.manager import CacheEvent, EventBatch

_KEPT_BATCHES = 10_000
_HIGH_WATER = 100_000
_CLOSE_TIMEOUT_S = 5.0
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class EventPublisher:
    def __init__(
        self,
        publishing: Publishing,
        block_size: int,
        *,
        now: Callable[[], float] = time.time,
        kept_batches: int = _KEPT_BATCHES,
    ) -> None:
        """Raises ConfigError when it cannot listen."""
        self._topic = publishing.topic.encode()
        self._block_size = block_size
        self._now = now
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._waiting: deque[bytes] = deque()
        self._next = 0
        self._closed = False
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, publishing.address)
            if publishing.replay:
                self._replay = self._socket(zmq.ROUTER, publishing.replay)
        except ConfigError:
            self._context.destroy(linger=0)
            os.close(self._news)
            raise
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it really listens."""
        return self._pub.get_string(zmq.LAST_ENDPOINT)

    @property
    def replay_address(self) -> str:
        return self._replay.get_string(zmq.LAST_ENDPOINT) if self._replay is not None else ""

    def publish(self, batch: EventBatch, present: Callable[[], list[CacheEvent]]) -> None:
        """What has happened. `present`: all that there is, as events; told from the beginning if
        some of what has happened was lost."""
        events: list[KvEvent] = []
        if batch.lost:
            events = [AllBlocksCleared(), *told(present(), self._block_size)]
        else:
            events = told(batch.events, self._block_size)
        if events:
            self._waiting.append(msgspec.msgpack.encode(KvEventBatch(self._now(), events)))
            os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """What was published is sent before."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._news, 1)
        self._thread.join(_CLOSE_TIMEOUT_S)
        os.close(self._news)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events: cannot listen on {address!r} ({error}): write it as tcp://*:5557"
            ) from error
        return socket

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._news, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news)
            is_last = self._closed  # what was published before it was closed is waiting by now
            self._send()
            if is_last:
                break
            if self._replay in ready:
                self._answer()
        self._context.destroy(linger=int(_CLOSE_TIMEOUT_S * 100))

    def _send(self) -> None:
        while self._waiting:
            payload = self._waiting.popleft()
            number = self._next
            self._next += 1
            self._kept.append((number, payload))
            self._pub.send_multipart([self._topic, _bytes(number), payload])

    def _answer(self) -> None:
        """To one who asks for all from a number on. What makes no sense is not answered."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            return
        who, gap, asked = frames
        first = int.from_bytes(asked, "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart([who, gap, self._topic, _bytes(number), payload])
        self._replay.send_multipart([who, gap, b"", _END, b""])


def _bytes(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")
