"""Answers that watch whether anybody is still there. Know HTTP, nothing of what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import Counter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import InputError
from quire.web.errors import ApiError, client_closed, from_input

Result = TypeVar("Result")

WAITING_S = 10.0
"""A stream without a first event says every so often that it is there, so that nobody between takes
it for dead."""

_COMMENT = b": waiting\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass each event on as it comes
]


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, Result], aborts: Counter
) -> Result:
    """`work`'s result; when the client goes away first, `work` is cancelled and ApiError raised.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        aborts.labels("disconnect").inc()
        raise client_closed()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The status goes out with the first: what fails before is an error answer,
    what fails later an event of its own, the last.

    When the first is long in coming, comments go out in its stead, and the status with them.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        aborts: Counter,
        on_unexpected: Callable[[Exception], ApiError],
        *,
        waiting_s: float = WAITING_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._aborts = aborts
        self._on_unexpected = on_unexpected
        self._waiting_s = waiting_s
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._pump(send), self._aborts)
        except ApiError:
            if not self._is_started:  # else the client has gone: there is nobody to tell
                raise

    async def _pump(self, send: Send) -> None:
        # Closed here and now, not when the garbage collector comes by: closing aborts.
        async with aclosing(self._events) as events:
            event: bytes | None = await self._first(events, send)
            await self._start(send)
            while event is not None:
                await _send(send, event)
                event = await self._next(anext(events, None))
        await send({"type": "http.response.body", "body": b""})

    async def _first(self, events: AsyncGenerator[bytes, None], send: Send) -> bytes | None:
        """Raises what comes instead, if nothing has gone out yet."""
        coming = asyncio.ensure_future(anext(events))
        try:
            while not coming.done():
                await asyncio.wait({coming}, timeout=self._waiting_s)
                if not coming.done():
                    await self._start(send)
                    await _send(send, _COMMENT)
            return await (self._next(coming) if self._is_started else coming)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    async def _next(self, coming: Awaitable[bytes | None]) -> bytes | None:
        """What fails is the last event."""
        try:
            return await coming
        except ApiError as error:
            return _error_event(error)
        except InputError as error:
            return _error_event(from_input(error))
        except Exception as error:  # the request boundary, once the status is out
            return _error_event(self._on_unexpected(error))

    async def _start(self, send: Send) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.encoded() + b"\n\n"
