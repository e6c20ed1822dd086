"""One try: a request sent to one server, and its answer, or how that was lost.

answer        any status that is final: the client's
Lost          nothing final came: another server may be asked

refused       nobody listens there               silent      no byte for too long
broken        the connection ended on the way    overloaded  429: its queue is full
unavailable   502, 503: engine gone, stopping
"""

from __future__ import annotations

import contextlib
import enum
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from quire.router.eventline import EventLine
from quire.router.fleet import Member
from quire.router.sieve import (
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    NoAnswer,
    answer_of,
    error_of,
)
from quire.web.errors import ApiError

_RETRIED_CODES = {
    "queue_full": "overloaded",
    "rejected": "overloaded",
    "too_many_connections": "overloaded",
    "engine_unavailable": "unavailable",
    "shutting_down": "unavailable",
}


class Why(enum.StrEnum):
    REFUSED = "refused"
    BROKEN = "broken"
    SILENT = "silent"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"

    @property
    def is_servers_fault(self) -> bool:
        """Whether the server should be looked after before it is used again."""
        return self is not Why.OVERLOADED


class Lost(Exception):
    def __init__(self, why: Why, error: ApiError | None = None) -> None:
        super().__init__(why.value)
        self.why = why
        self.error = error
        """The server's own words, if it had any."""


class Endpoint(enum.Enum):
    """All that the router passes requests on to. A client chooses among these and spells none:
    what it writes never becomes a part of an address."""

    CHAT = ("POST", "/v1/chat/completions")
    COMPLETIONS = ("POST", "/v1/completions")
    RESPONSES = ("POST", "/v1/responses")
    TOKENIZE = ("POST", "/tokenize")
    DETOKENIZE = ("POST", "/detokenize")
    MODELS = ("GET", "/v1/models")


class Inquiry(NamedTuple):
    """A client's request, as it is sent on."""

    endpoint: Endpoint
    body: bytes
    headers: Mapping[str, str]
    model: str | None = None
    is_stream: bool = False
    is_vouched: bool = False
    """The router has looked at the client's key."""
    asked: dict[str, Any] | None = None
    """The body, if a stream of it can go on after its tokens."""
    shows_ids: bool = True
    """The client gets to see them, if there are any."""
    goes_on: str = ""
    """The response that it goes on with, which one server has."""
    cache_key: str = ""
    """Requests with the same one are to meet on a server."""

    def after(self, said: Sequence[int]) -> Inquiry:
        """The same, for an answer that has got so far."""
        if self.asked is None or not said:
            return self
        body = msgspec.json.encode(self.asked | {"continue_token_ids": said})
        return self._replace(body=body)


class Reply(NamedTuple):
    """A whole answer: a JSON object."""

    content: bytes


class Upstream:
    def __init__(
        self, client: httpx.AsyncClient, trust: ssl.SSLContext, idle_timeout_s: float
    ) -> None:
        """`trust`: as the client's, for streams, which go past it."""
        self._client = client
        self._trust = trust
        self._timeout_s = idle_timeout_s

    async def whole(self, member: Member, inquiry: Inquiry, headers: Mapping[str, str]) -> Reply:
        """Raises Lost, and ApiError for an answer that is an error."""
        async with self._open(member, inquiry, headers) as response:
            content = await self._read(member, response)
            try:
                return Reply(answer_of(content))
            except NoAnswer:
                raise Lost(Why.BROKEN) from None

    async def events(
        self, member: Member, inquiry: Inquiry, headers: Mapping[str, str]
    ) -> AsyncGenerator[list[bytes], None]:
        """The data of events, those together that have come together. Raises Lost, and ApiError for
        an answer that is an error. It ends when the connection does, well or not."""
        with member.following(await self._ask(member, inquiry, headers)) as line:
            with _losses():
                status, answered = await line.head()
            buffer = b""
            while True:
                with _losses():
                    piece = await line.read()
                if piece is None:
                    break
                buffer += piece
                if status != 200:
                    if len(buffer) > MAX_ANSWER_BYTES:
                        raise Lost(Why.BROKEN)
                    continue
                *events, buffer = buffer.split(b"\n\n")
                if len(buffer) > MAX_EVENT_BYTES:
                    raise Lost(Why.BROKEN)
                if told := [data for event in events if (data := _data_of(event)) is not None]:
                    yield told
            if status != 200:
                raise _refusal(status, answered, buffer)

    async def _ask(self, member: Member, inquiry: Inquiry, headers: Mapping[str, str]) -> EventLine:
        """Raises Lost."""
        method, path = inquiry.endpoint.value
        asked = {**inquiry.headers, **headers}
        try:
            async with member.reading(self._client.timeout.connect or self._timeout_s):
                return await EventLine.open(
                    member.url,
                    method,
                    path,
                    asked,
                    inquiry.body,
                    trust=self._trust,
                    timeout_s=self._timeout_s,
                )
        except OSError:
            raise Lost(Why.REFUSED) from None

    @contextlib.asynccontextmanager
    async def _open(
        self, member: Member, inquiry: Inquiry, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        method, path = inquiry.endpoint.value
        request = self._client.build_request(
            method,
            member.url + path,
            content=inquiry.body,
            headers={**inquiry.headers, **headers},
        )
        with _losses():
            async with member.reading(self._timeout_s):
                response = await self._client.send(request, stream=True)
        async with contextlib.aclosing(response):
            if response.status_code != 200:
                content = await self._read(member, response)
                raise _refusal(response.status_code, response.headers, content)
            yield response

    async def _read(self, member: Member, response: httpx.Response) -> bytes:
        content = bytearray()
        pieces = response.aiter_bytes()
        while True:
            with _losses():
                async with member.reading(self._timeout_s):
                    piece = await anext(pieces, None)
            if piece is None:
                return bytes(content)
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise Lost(Why.BROKEN)


def lost_by(error: Mapping[str, Any]) -> Lost | None:
    """An error that a server ended a stream with; None: it is final."""
    why = _RETRIED_CODES.get(str(error.get("code")))
    return None if why is None else Lost(Why(why), error_of(503, error))


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise Lost(Why.REFUSED) from None
    except (httpx.TimeoutException, TimeoutError):
        raise Lost(Why.SILENT) from None
    except (httpx.HTTPError, OSError):
        raise Lost(Why.BROKEN) from None


def _data_of(event: bytes) -> bytes | None:
    """Without its kind, which the data says too."""
    data = event.partition(b"\n")[2] if event.startswith(b"event:") else event
    return data.removeprefix(b"data:").strip() if data.startswith(b"data:") else None


def _refusal(status: int, headers: Mapping[str, str], content: bytes) -> Lost | ApiError:
    try:
        body = msgspec.json.decode(content)
        found = body["error"] if isinstance(body["error"], dict) else {}
    except (msgspec.DecodeError, TypeError, KeyError):
        found = {}
    error = error_of(status, found, headers)
    why = _RETRIED_CODES.get(str(error.code))
    if why is None and status in (429, 502, 503):
        why = "overloaded" if status == 429 else "unavailable"
    return error if why is None else Lost(Why(why), error)
