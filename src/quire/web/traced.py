"""Tracer: what a server or a router tells of its requests, as spans. With `--otlp` only.

    POST /v1/chat/completions        a request: the router's, and in it the server's
      generate                       an answer: a choice, from the engine's side
        receive pages                a hand-over, as the decode server saw it
        give pages                   … and the prefill server that it asked

Who asks may say, by a `traceparent` header, which trace a request belongs to, and that it is not to
be recorded. The header that goes on, to another server or to the engine, names our own span. Knows
ASGI's messages; not what is known of answers and hand-overs, nor how spans travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import quire
from quire.tracing.exporter import Exporter
from quire.tracing.spans import Attribute, Span, SpanEvent, SpanKind, TraceContext
from quire.web.errors import CLIENT_CLOSED
from quire.web.guards import endpoint_of

_HEADER = b"traceparent"
_TRACED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

_current: ContextVar[TraceContext | None] = ContextVar("current", default=None)
"""Of the request that is being answered; None: it is not traced."""


class Tracer:
    def __init__(
        self,
        url: str,
        count: Callable[[str, int], None],
        about: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`about`: of the process. `clock`: all times that are told are by it. Raises
        ConfigError."""
        resource = {"service.name": "quire", "service.version": quire.__version__, **about}
        self._exporter = Exporter(url, resource, count)
        self._clock = clock
        self._now = now

    def close(self) -> None:
        self._exporter.close()

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with a span for each request that asks for an answer."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] not in _TRACED:
                await app(scope, receive, send)
                return
            parent = _parent_of(scope)
            if parent is not None and not parent.is_sampled:
                await app(scope, receive, send)
                return
            context = parent.child() if parent is not None else TraceContext.new()
            scope["headers"] = [
                *((name, value) for name, value in scope["headers"] if name != _HEADER),
                (_HEADER, context.header.encode()),
            ]
            _current.set(context)
            began_s, status = self._clock(), CLIENT_CLOSED

            async def watch(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, watch)
            finally:
                self._request(scope, context, parent, began_s, status)

        return traced

    def header(self) -> str:
        """Of a span for one answer of the request that is served; empty: it is not traced."""
        context = _current.get()
        return context.child().header if context is not None else ""

    def tell(
        self,
        header: str,
        name: str,
        *,
        began_s: float,
        about: Mapping[str, Attribute],
        moments: Mapping[str, float],
        error: str,
    ) -> None:
        """A part of the request that is served ends now. `header`: as it was made for it;
        `moments`: what happened in it, and when."""
        context, parent = TraceContext.read(header), _current.get()
        if context is None or parent is None:
            return
        self._add(
            context,
            parent.span,
            name,
            kind=SpanKind.INTERNAL,
            began_s=began_s,
            ended_s=self._clock(),
            about=about,
            events=[SpanEvent(what, self._ns(at_s)) for what, at_s in moments.items()],
            error=error,
        )

    def tell_of_others(
        self,
        header: str,
        name: str,
        *,
        is_asked: bool,
        began_s: float,
        ended_s: float,
        about: Mapping[str, Attribute],
    ) -> None:
        """What was done with another server, for whoever sent `header`. `is_asked`: it asked us."""
        parent = TraceContext.read(header)
        if parent is None:
            return
        kind = SpanKind.SERVER if is_asked else SpanKind.CLIENT
        self._add(
            parent.child(),
            parent.span,
            name,
            kind=kind,
            began_s=began_s,
            ended_s=ended_s,
            about=about,
        )

    def _request(
        self,
        scope: Scope,
        context: TraceContext,
        parent: TraceContext | None,
        began_s: float,
        status: int,
    ) -> None:
        endpoint = endpoint_of(scope["path"])
        about = {
            "http.request.method": scope["method"],
            "http.route": endpoint,
            "http.response.status_code": status,
            "quire.request": str(scope.get("quire.request_id", "")),
        }
        self._add(
            context,
            parent.span if parent is not None else "",
            f"{scope['method']} {endpoint}",
            kind=SpanKind.SERVER,
            began_s=began_s,
            ended_s=self._clock(),
            about=about,
            error=str(status) if status >= 500 else "",
        )

    def _add(
        self,
        context: TraceContext,
        parent: str,
        name: str,
        *,
        kind: SpanKind,
        began_s: float,
        ended_s: float,
        about: Mapping[str, Attribute],
        events: list[SpanEvent] | None = None,
        error: str = "",
    ) -> None:
        self._exporter.add(
            Span(
                context=context,
                parent=parent,
                name=name,
                kind=kind,
                began_ns=self._ns(began_s),
                ended_ns=self._ns(ended_s),
                attributes=about,
                events=events or (),
                error=error,
            )
        )

    def _ns(self, at_s: float) -> int:
        return int((self._now() - self._clock() + at_s) * 1e9)


def _parent_of(scope: Scope) -> TraceContext | None:
    found = [value for name, value in scope["headers"] if name == _HEADER]
    return TraceContext.read(found[0].decode("latin-1")) if len(found) == 1 else None
