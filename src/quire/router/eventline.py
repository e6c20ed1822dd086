"""EventLine: one request to a server whose answer comes in pieces, as they come.

    open ──▶ head (status, headers) ──▶ read, read, … ──▶ None: the answer is complete
      └────────────┴───────────────────────┴──▶ OSError: it ended before that; TimeoutError: nothing
                                                came for too long, or nobody waits any more

A stream tells one token at a time, and a router passes thousands of streams on: so a piece goes
from the socket's callback to the one who waits for it, with h11 for the protocol and nothing in
between. Who reads slowly stops the server: no more than so many bytes wait here. Each answer has a
connection of its own. Knows HTTP/1.1, nothing of events.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

_HIGH_BYTES = 256 * 1024
"""So many may wait to be read."""
_MAX_HEAD_BYTES = 64 * 1024


class Head(NamedTuple):
    status: int
    headers: dict[str, str]


class EventLine(asyncio.Protocol):
    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: without a byte, while somebody waits for one."""
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._head: Head | None = None
        self._waiting = bytearray()
        self._is_paused = False
        self._is_complete = False
        self._error: OSError | None = None
        self._woken: asyncio.Future[None] | None = None
        """Of the one who waits."""
        self._waits_since_s = self._loop.time()
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        """Runs from when there is a connection: of one that never was nobody would end it."""

    @classmethod
    async def open(
        cls,
        url: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        trust: ssl.SSLContext,
        timeout_s: float,
    ) -> EventLine:
        """Connect and ask. `trust`: for an `https://` server. Raises OSError."""
        address = urlsplit(url)
        secure = trust if address.scheme == "https" else None
        port = address.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: cls(timeout_s), address.hostname or "", port, ssl=secure
        )
        fields = {**headers, "host": address.netloc, "connection": "close"}
        fields["content-length"] = str(len(body))
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
        line._send(h11.Request(method=method, target=path, headers=encoded))
        line._send(h11.Data(data=body))
        line._send(h11.EndOfMessage())
        return line

    async def head(self) -> Head:
        """Raises OSError."""
        while self._head is None:
            await self._news()
        return self._head

    async def read(self) -> bytes | None:
        """All that has come, of which there is some; None: the answer is complete. Raises
        OSError, when all that came before is read."""
        while not self._waiting:
            if self._is_complete:
                return None
            await self._news()
        piece = bytes(self._waiting)
        self._waiting.clear()
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    def give_up(self) -> None:
        """Whoever waits need not: TimeoutError, when all that came before is read."""
        self._fail(TimeoutError())

    def close(self) -> None:
        """Nobody reads any more. Harmless if it is closed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # ---- what the loop calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._timer = self._loop.call_later(self._timeout_s, self._look)

    def data_received(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            self._take_events()
        except h11.RemoteProtocolError as error:
            self._fail(ConnectionError(f"this is no HTTP: {error}"))
        if len(self._waiting) > _HIGH_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.data_received(b"")  # an answer may end with its connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(ConnectionError("the connection ended"))

    # ---- inside ---------------------------------------------------------------------------------

    def _send(self, event: h11.Event) -> None:
        assert self._transport is not None
        if data := self._http.send(event):
            self._transport.write(data)

    def _take_events(self) -> None:
        while True:
            event = self._http.next_event()
            if type(event) is h11.Data:
                self._waiting += event.data
            elif type(event) is h11.Response:
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                self._head = Head(event.status_code, headers)
            elif type(event) is h11.EndOfMessage:
                self._is_complete = True
                self.close()
                return
            elif type(event) is not h11.InformationalResponse:  # no more for now
                return

    def _fail(self, error: OSError) -> None:
        if not self._is_complete and self._error is None:
            self._error = error
            self.close()
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _news(self) -> None:
        """Something has come, or it has ended. Raises OSError."""
        if self._error is not None:
            raise self._error
        self._waits_since_s = self._loop.time()
        self._woken = self._loop.create_future()
        try:
            await self._woken
        finally:
            self._woken = None

    def _look(self) -> None:
        """One timer for all waits, which are many and short: at its end it runs on for the wait
        under way."""
        now = self._loop.time()
        due_s = (self._waits_since_s if self._woken is not None else now) + self._timeout_s
        if due_s <= now:
            self.give_up()
        else:
            self._timer = self._loop.call_at(due_s, self._look)
