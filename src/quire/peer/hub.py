"""PeerHub: a leader's line to other leaders. Queues in and out; the step thread never waits.

Knows links, liveness and the handshake; passes messages on without looking inside. One thread with
an event loop does all the I/O.

    connect(address)  ──▶ dial ──handshake──▶ CONNECTED ──lost, silent──▶ wait, dial again
                            └──refused, unreachable──▶ wait, dial again
    incoming          ──▶ handshake ──▶ CONNECTED ("in-N") ──lost, silent──▶ gone

Every way out of a dial or of CONNECTED is one `Disconnected` with its reason. A stranger who does
not get through the handshake leaves no trace but a counter.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import msgspec

from quire.decoders import msgpack_decoder
from quire.errors import ConfigError
from quire.peer import messages
from quire.peer.address import split_address
from quire.peer.errors import PeerError
from quire.peer.framing import close_stream, read_frame, secured, why_failed
from quire.peer.greet import check_seal
from quire.peer.handshake import (
    MAX_FRAME_BYTES,
    TIMEOUT_S,
    Handshake,
    Objection,
    Purpose,
    Side,
    objection,
)
from quire.peer.kinds import TransportKind
from quire.peer.link_events import Connected, Disconnected, Hello, HubEvent, Received
from quire.peer.messages import Beat, PeerMessage
from quire.peer.tcp import bound_address, listening_socket
from quire.peer.tls import check_certificate, tls_context
from quire.peer.unix import can_reach, near_address
from quire.peer.wire import framed
from quire.types import Clock

__all__ = [
    "Connected",
    "Disconnected",
    "Hello",
    "HubEvent",
    "HubLimits",
    "PeerHub",
    "Received",
]


_ITSELF = "that is this engine itself: leave it out of its own peers"
_ACCEPT_PAUSE_S = 0.05
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class HubLimits:
    """Bounds of the line between leaders."""

    beat_s: float = 3.0
    """Without sending anything, before a Beat goes out."""
    silence_s: float = 10.0
    """Without hearing anything, before a link is given up."""
    first_retry_s: float = 0.1
    last_retry_s: float = 5.0
    """Pauses between attempts to connect double from the one to the other."""
    max_message_bytes: int = 16 << 20
    max_queued: int = 4096
    """Messages waiting per link to be sent, and in all to be polled."""
    max_queued_bytes: int = 64 << 20
    """Of the same."""
    max_incoming: int = 256
    """Links from others; more are closed at once."""
    max_strangers: int = 64
    """Connections that have not shaken hands yet; one more closes the oldest of them, so that
    those who say nothing keep nobody out."""


@dataclass(slots=True)
class _Link:
    """A link that is CONNECTED."""

    name: str
    heard: float
    sent: float
    outgoing: deque[bytes] = field(default_factory=deque)
    outgoing_bytes: int = 0
    """Of what is queued and of what is just being sent."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class PeerHub:
    """Any thread may use it; poll() is for one."""

    def __init__(
        self,
        hello: Hello,
        secret: str,
        *,
        listen: str | None,
        transport: TransportKind = TransportKind.AUTO,
        clock: Clock = time.monotonic,
        limits: HubLimits | None = None,
    ) -> None:
        """`listen`: as `tcp://127.0.0.1:0`, where port 0 is any free one; None: only connects.

        Raises ConfigError when it cannot listen there.
        """
        if not secret:
            raise ConfigError("peer_secret is empty: engines that exchange pages must share one")
        self._hello = hello
        self._secret = secret
        self._transport = transport
        self._clock = clock
        self._limits = limits or HubLimits()
        self._lock = threading.Lock()  # links, events and their sizes; never held across I/O
        self._links: dict[str, _Link] = {}
        self._events: deque[tuple[HubEvent, int]] = deque()
        self._events_bytes = 0
        self._wanted: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """All of the loop's that are not part of another."""
        self._greeting: dict[socket.socket, asyncio.Task[None]] = {}
        """Of those who have not shaken hands yet, the oldest first."""
        self._num_incoming = 0
        self._numbers = itertools.count(1)
        self._strangers = 0
        self._closed = False
        listener = None
        if listen is not None:
            _check_scheme(listen)
            listener = listening_socket(listen)
        self.address = bound_address(listener) if listener is not None else ""
        """Where it really listens; empty if it does not."""
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="quire-peer-hub", daemon=True
        )
        self._thread.start()

    @property
    def strangers(self) -> int:
        """Connections that did not get through the handshake."""
        return self._strangers

    def connect(self, address: str) -> None:
        """Keep a link of this name to the leader there; does nothing if there is one already.

        Never waits. Raises ConfigError for what is not an address.
        """
        _check_scheme(address)
        self._call(lambda: self._want(address))

    def disconnect(self, address: str) -> None:
        """Undo connect(). A link that was up is reported as Disconnected."""
        self._call(lambda: self._unwant(address))

    def send(self, link: str, message: PeerMessage) -> bool:
        """Queue a message. False, and nothing done: not connected, its queue full, too long."""
        data = framed(messages.encode(message))
        limits = self._limits
        with self._lock:
            found = self._links.get(link)
            if (
                found is None
                or len(found.outgoing) >= limits.max_queued
                or len(data) > limits.max_message_bytes
                or found.outgoing_bytes + len(data) > limits.max_queued_bytes
            ):
                return False
            found.outgoing.append(data)
            found.outgoing_bytes += len(data)
        self._call(found.news.set)
        return True

    def poll(self) -> list[HubEvent]:
        """What has happened since the last call, in order. Never waits."""
        with self._lock:
            if self._events and not self._closed:
                os.eventfd_read(self._news)
            events = [event for event, _ in self._events]
            self._events.clear()
            self._events_bytes = 0
        return events

    def fileno(self) -> int:
        """Readable when poll() has something; for whoever sleeps."""
        return self._news

    def close(self) -> None:
        """Drop all links. Nothing is reported any more."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
        self._call(self._stop.set)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._events.clear()
        os.close(self._news)

    # ---- the loop's thread ----------------------------------------------------------------------

    def _call(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: so are we
            self._loop.call_soon_threadsafe(function)

    def _run(self, listener: socket.socket | None) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(listener))
        finally:
            self._loop.close()

    async def _serve(self, listener: socket.socket | None) -> None:
        if listener is not None:
            listener.setblocking(False)
            self._listen(listener)
        await self._stop.wait()
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, life: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(life)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _want(self, address: str) -> None:
        if address not in self._wanted and not self._stop.is_set():
            self._wanted[address] = self._spawn(self._keep_connected(address))

    def _unwant(self, address: str) -> None:
        task = self._wanted.pop(address, None)
        if task is not None:
            task.cancel()

    def _listen(self, listener: socket.socket) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it went away again
            return
        except OSError:  # no descriptors left: it has to wait
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._listen, listener)
            return
        if self._num_incoming - len(self._greeting) >= self._limits.max_incoming:
            sock.close()
            return
        if len(self._greeting) >= self._limits.max_strangers:
            self._greeting.pop(next(iter(self._greeting))).cancel()
        self._num_incoming += 1

        def left(_: asyncio.Task[None]) -> None:
            # Here, and not in the task: one that is cancelled early never begins.
            self._num_incoming -= 1
            self._greeting.pop(sock, None)
            sock.close()

        task = self._greeting[sock] = self._spawn(self._take_in(sock))
        task.add_done_callback(left)

    async def _keep_connected(self, address: str) -> None:
        limits = self._limits
        pause_s = limits.first_retry_s
        while True:
            reason = await self._dial(address)
            # One that fails again and again while nobody polls is not worth remembering for ever.
            if reason and not self._is_full():
                self._happened(Disconnected(address, reason))
            pause_s = min(pause_s * 2, limits.last_retry_s) if reason else limits.first_retry_s
            await asyncio.sleep(pause_s)

    async def _dial(self, address: str) -> str:
        """One connection's life: why it did not come up, or nothing if it did."""
        _, host, port = split_address(address)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_FRAME_BYTES)
        except (TimeoutError, OSError) as error:
            return f"{address} cannot be reached ({why_failed(error)}): is the engine running?"
        try:
            try:
                hello, reader, writer = await self._greet(Side.DIALER, reader, writer)
            except (TimeoutError, OSError, EOFError, PeerError) as error:
                return f"{address} did not let us in: {why_failed(error)}"
            await self._talk(address, hello, reader, writer)
            return ""
        finally:
            await close_stream(writer)

    async def _take_in(self, sock: socket.socket) -> None:
        """One incoming connection's life."""
        try:
            reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_FRAME_BYTES)
            try:
                hello, reader, writer = await self._greet(Side.LISTENER, reader, writer)
                self._greeting.pop(sock, None)
                await self._talk(f"in-{next(self._numbers)}", hello, reader, writer)
            finally:
                await close_stream(writer)
        except (TimeoutError, OSError, EOFError, PeerError):
            self._strangers += 1

    async def _greet(
        self, side: Side, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Hello, asyncio.StreamReader, asyncio.StreamWriter]:
        """Their Hello, with their hosts filled in; and where to go on with them."""
        handshake = self._handshake(side)
        async with asyncio.timeout(TIMEOUT_S):
            if side is Side.DIALER:
                writer.write(framed(handshake.start()))
            try:
                while not handshake.done:
                    answer = handshake.feed(await read_frame(reader, MAX_FRAME_BYTES))
                    if handshake.done and side is Side.LISTENER:
                        writer.transport.pause_reading()  # what comes next is not for us to read
                    if answer:
                        writer.write(framed(answer))
                        await writer.drain()
            except PeerError as error:
                if error.reply:
                    writer.write(framed(error.reply))
                    await writer.drain()
                raise
            reader, writer = await self._seal(side, handshake, writer)
        hello = msgpack_decoder(Hello).decode(handshake.peer_card)
        remote = writer.get_extra_info("peername")
        if remote is None:
            raise EOFError("it is gone already")
        return hello.seen_from(remote[0]), reader, writer

    async def _seal(
        self, side: Side, handshake: Handshake, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """As greet.py does it."""
        dials = side is Side.DIALER
        context = tls_context(self._secret, is_server=not dials)
        reader, writer = await secured(writer, context, is_server=not dials)
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            check_certificate(self._secret, shown)
            writer.write(framed(handshake.seal(side)))
            theirs = Side.LISTENER if dials else Side.DIALER
            check_seal(handshake, theirs, await read_frame(reader, MAX_FRAME_BYTES))
        except BaseException:  # nobody else knows of it yet
            writer.transport.abort()
            raise
        return reader, writer

    def _handshake(self, side: Side) -> Handshake:
        ours = self._hello

        def check(card: bytes) -> Objection | None:
            theirs = msgpack_decoder(Hello).decode(card)
            try:
                for part in theirs.parts:
                    split_address(part.address)
            except ConfigError as error:
                raise PeerError(str(error)) from error
            if theirs.epoch == ours.epoch:
                return Objection(_ITSELF, _ITSELF)
            return objection(ours.identity, theirs.identity)

        card = msgspec.msgpack.encode(ours)
        version = ours.identity.version
        return Handshake(side, Purpose.CONTROL, self._secret, card, check, version=version)

    # ---- a link that is up ----------------------------------------------------------------------

    async def _talk(
        self,
        name: str,
        hello: Hello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """From Connected to Disconnected."""
        transport = await self._transport_to(hello)
        now = self._clock()
        link = _Link(name, heard=now, sent=now)
        with self._lock:
            self._links[name] = link
        self._happened(Connected(name, hello, transport))
        jobs = [
            self._loop.create_task(job)
            for job in (self._read(link, reader), self._write(link, writer), self._watch(link))
        ]
        reason = "we disconnected"
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            reason = done.pop().result()
        finally:
            # At once: by now there may be another of its name on the way.
            with self._lock:
                del self._links[name]
            self._happened(Disconnected(name, reason))
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _transport_to(self, hello: Hello) -> str:
        """By which their ranks' pages are read: shared memory, if all are on this machine."""
        kind = self._transport
        if kind is TransportKind.AUTO:
            places = [near_address(self._secret, hello.epoch, p.address) for p in hello.parts]
            near = [await asyncio.to_thread(can_reach, place) for place in places]
            kind = TransportKind.SHM if near and all(near) else TransportKind.TCP
        return kind.value

    async def _read(self, link: _Link, reader: asyncio.StreamReader) -> str:
        try:
            while True:
                data = await read_frame(reader, self._limits.max_message_bytes)
                link.heard = self._clock()
                try:
                    message = messages.decode(data)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    return "the peer does not keep to the protocol"
                if not isinstance(message, Beat):
                    self._happened(Received(link.name, message), len(data))
                while self._is_full():  # nobody polls: let the other side wait, but not be lost
                    await asyncio.sleep(0.01)
                    link.heard = self._clock()
        except EOFError:
            return "the peer closed the connection"
        except (OSError, PeerError) as error:
            return f"the connection failed: {why_failed(error)}"

    async def _write(self, link: _Link, writer: asyncio.StreamWriter) -> str:
        try:
            while True:
                await link.news.wait()
                link.news.clear()
                while link.outgoing:
                    data = link.outgoing.popleft()
                    writer.write(data)
                    await writer.drain()
                    link.sent = self._clock()
                    with self._lock:
                        link.outgoing_bytes -= len(data)
        except OSError as error:
            return f"the connection failed: {why_failed(error)}"

    async def _watch(self, link: _Link) -> str:
        limits = self._limits
        while True:
            await asyncio.sleep(min(limits.beat_s, limits.silence_s) / 10)
            now = self._clock()
            if now - link.heard >= limits.silence_s:
                return f"no sign of life for {now - link.heard:.1f} s"
            if now - link.sent >= limits.beat_s and not link.outgoing:
                link.sent = now
                self.send(link.name, Beat())

    # ---- events ---------------------------------------------------------------------------------

    def _happened(self, event: HubEvent, size_bytes: int = 0) -> None:
        with self._lock:
            self._events.append((event, size_bytes))
            self._events_bytes += size_bytes
            if not self._closed:
                os.eventfd_write(self._news, 1)

    def _is_full(self) -> bool:
        return (
            len(self._events) >= self._limits.max_queued
            or self._events_bytes >= self._limits.max_queued_bytes
        )


def _check_scheme(address: str) -> None:
    scheme, _, _ = split_address(address)
    if scheme != "tcp":
        raise ConfigError(f"leaders speak over tcp, not over {scheme!r}: write tcp://host:port")
