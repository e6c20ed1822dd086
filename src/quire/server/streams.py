"""Answers that watch whether anybody is still there. Know HTTP, nothing of what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import Counter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import ApiError, client_closed

Result = TypeVar("Result")

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
    what fails later an event of its own, the last."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        aborts: Counter,
        on_unexpected: Callable[[Exception], ApiError],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._aborts = aborts
        self._on_unexpected = on_unexpected
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
            event: bytes | None = await anext(events)
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            while event is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                try:
                    event = await anext(events, None)
                except ApiError as error:
                    event = _error_event(error)
                except Exception as error:  # the request boundary, once the status is out
                    event = _error_event(self._on_unexpected(error))
        await send({"type": "http.response.body", "body": b""})


def _error_event(error: ApiError) -> bytes:
    return b"data: " + error.encoded() + b"\n\n"
