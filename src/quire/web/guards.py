"""The ASGI layers around the application. Know HTTP messages, nothing of what is answered.

Boundary    every request ends in an answer in our format, is counted and has an id
BodyGuard   a body is no larger and comes no slower than it may
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import InputError
from quire.sizes import format_bytes
from quire.web.config import WebConfig
from quire.web.errors import CLIENT_CLOSED, ApiError, from_input, invalid, shutting_down

if TYPE_CHECKING:
    from quire.web.traced import Tracer

REQUEST_ID_HEADER = b"x-request-id"
_REQUEST_ID = re.compile(rb"[\w.:/+=@-]{1,128}")
"""What may stand in a log as it was sent."""

serving: ContextVar[str] = ContextVar("serving", default="")
"""The id of the request that is being answered, as its client is told it. Tasks have that of the
context that they were made in."""

_KNOWN_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/health",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/admin/cache",
        "/admin/cache/flush",
        "/admin/cache/prefetch",
        "/admin/store",
        "/admin/info",
        "/admin/requests",
        "/admin/tenants",
        "/admin/tree",
        "/ui",
        "/admin/events",
        "/admin/keys",
        "/admin/drain",
    }
)


def endpoint_of(path: str) -> str:
    """A path as a metric's label: as many values as there are endpoints, and one for the rest."""
    if path in _KNOWN_PATHS:
        return path
    return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"


def _request_id(scope: Scope) -> str:
    """As whoever asks calls it, so that it is found in our log as in theirs; or one of our own."""
    given = next((value for name, value in scope["headers"] if name == REQUEST_ID_HEADER), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"


def request_id_of(scope: Scope) -> str:
    return str(scope["quire.request_id"])


class Figures(Protocol):
    """What is counted of every request."""

    requests: Counter
    """By endpoint and status."""
    in_flight: Gauge
    request_seconds: Histogram
    """By endpoint."""


class Host(Protocol):
    """Whoever answers: a server's Service, or a router."""

    clock: Callable[[], float]
    tracer: Tracer | None

    @property
    def metrics(self) -> Figures: ...

    def failed_unexpectedly(self, error: BaseException, request_id: str) -> ApiError: ...


class Boundary:
    def __init__(self, app: ASGIApp, service: Host) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, _request_id(scope))
        scope["quire.request_id"] = answer.request_id
        serving.set(answer.request_id)
        metrics, clock = self._service.metrics, self._service.clock
        endpoint, started = endpoint_of(scope["path"]), clock()
        metrics.in_flight.inc()
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:
            await answer.fail(shutting_down())
            raise
        except ApiError as error:
            await answer.fail(error)
        except Exception as error:  # the request boundary
            await answer.fail(self._service.failed_unexpectedly(error, answer.request_id))
        finally:
            metrics.in_flight.dec()
            metrics.requests.labels(endpoint, str(answer.status)).inc()
            metrics.request_seconds.labels(endpoint).observe(clock() - started)


class _Answer:
    """Watches one answer go out."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = CLIENT_CLOSED
        self._is_started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
            self.status = message["status"]
            _add_header(message, REQUEST_ID_HEADER, self.request_id.encode())
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun: then the connection is cut."""
        if self._is_started:
            return
        response = error.response()
        start = {
            "type": "http.response.start",
            "status": response.status_code,
            "headers": response.raw_headers,
        }
        await self.send(start)
        await self.send({"type": "http.response.body", "body": response.body})


class BodyGuard:
    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            body = _GuardedBody(scope, receive, send, self._max_bytes, self._timeout_s)
            await self._app(scope, body.receive, body.send)
        else:
            await self._app(scope, receive, send)


class _GuardedBody:
    """One request's body on its way in, and what its answer must do about it.

    An answer that goes out before the body is in would leave the client sending: the rest is read
    and dropped first, within the same limits, or else the connection is closed with the answer.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, max_bytes: int, timeout_s: float
    ) -> None:
        headers = dict(scope["headers"])
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._declared = _int(headers.get(b"content-length", b""))
        self._awaits_continue = b"expect" in headers
        self._num_bytes = 0
        self._is_complete = not self._declared and b"transfer-encoding" not in headers

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._declared > self._max_bytes:
            raise self._too_large()
        try:
            message = await self._next()
        except TimeoutError:
            raise ApiError(
                408,
                f"the request's body did not arrive within {self._timeout_s:g} s: send it faster",
                code="slow_body",
            ) from None
        if self._num_bytes > self._max_bytes:
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not await self._drained():
            _add_header(message, b"connection", b"close")
        await self._send(message)

    async def _next(self) -> Message:
        async with asyncio.timeout_at(self._deadline):
            message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        return message

    async def _drained(self) -> bool:
        """Whether the connection can be used again."""
        if not self._is_complete and (
            self._awaits_continue or self._declared > 4 * self._max_bytes
        ):
            return False
        try:
            while not self._is_complete and self._num_bytes <= 4 * self._max_bytes:
                await self._next()
        except TimeoutError:
            return False
        return self._is_complete

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request's body is larger than {format_bytes(self._max_bytes)}, which is the "
            "most that is read: send less",
            code="body_too_large",
        )


def _add_header(message: MutableMapping[str, Any], name: bytes, value: bytes) -> None:
    message["headers"] = [*message.get("headers", []), (name, value)]


def _int(digits: bytes) -> int:
    return int(digits) if digits.isdigit() else 0


# ---- all of it, around an application ------------------------------------------------------------


def guard(app: FastAPI, host: Host, config: WebConfig) -> None:
    """Error answers in our format, and the guards around all of it."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(InputError, _input_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _query_error)
    # The last added is the outermost.
    app.add_middleware(BodyGuard, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    app.add_middleware(Boundary, service=host)
    if host.tracer is not None:
        app.add_middleware(host.tracer.around)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _input_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, InputError)
    return from_input(error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router says by itself: no such path, no such method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.scope['path'][:200]}"
    headers = error.headers
    match error.status_code:
        case 404:
            message = f"there is no {what}: see /openapi.json for what there is"
        case 405:
            allowed = ", ".join(_methods(request))
            headers = {**(headers or {}), "Allow": allowed}
            message = f"{what} is not possible: use {allowed}"
        case _:
            message = str(error.detail)
    answer = ApiError(error.status_code, message, headers=headers)
    return answer.response()


def _methods(request: Request) -> list[str]:
    """All that its path can be asked with: the router tells only of the first route that it has."""
    found: set[str] = set()
    for path, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", ".+", path), request.scope["path"]):
            found |= {method.upper() for method in operations}
    return sorted(found)


async def _query_error(request: Request, error: Exception) -> Response:
    """A query parameter of the wrong type; bodies are read by incoming.py."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return invalid(param, f"{param}: {first['msg']}").response()
