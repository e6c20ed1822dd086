"""What comes in: who calls, whose pages a request is about, and its body.

A tenant is who shares an API key of its own or a `cache_salt`; those with neither are one tenant,
with nothing to limit it. What the requests of a tenant by key cache is its own: no other shares it,
whatever `cache_salt` says, and its salts count together.

A JSON body becomes one of the shapes of requests.py and responses/fields.py. Fields that nobody
knows are ignored, and named in the log once each: clients send fields of other servers, and newer
ones of OpenAI's. Knows headers, keys, salts and shapes, nothing of what these mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from quire.errors import ConfigError
from quire.store.url import redact
from quire.text.shapes import Body
from quire.types import TENANT_MARK, tenant_of
from quire.web.addresses import parse_peers
from quire.web.errors import ApiError, client_closed, from_validation, invalid, overloaded
from quire.web.routes import PREFILL_HEADER, PREFILLER_HEADER, ROUTE_HEADER, RouterNote


class Caller(NamedTuple):
    tenant: str = ""
    """By its key; empty: it has the server's own, or needs none."""
    prefill: Sequence[str] = ()
    """Page servers of prefill servers, if a router has named some."""

    def salt(self, cache_salt: str | None) -> str:
        """Of a request's namespace. A mark no client can send keeps tenants by key apart from those
        by salt."""
        own = cache_salt or ""
        return f"{self.tenant}{TENANT_MARK}{own}" if self.tenant else own


def prefill_of(
    headers: Mapping[str, str],
    note: RouterNote | None,
    *,
    is_decode: bool,
    known: Collection[str] = (),
) -> Sequence[str]:
    """The prefill servers that a request names; none if it names none. `note`: what a router has
    said of it. `known`: those that this server is connected to, one of which anybody may name to
    be asked first. Raises ApiError."""
    text = headers.get(PREFILL_HEADER)
    if text is None:
        return _hinted(headers.get(PREFILLER_HEADER), known) if is_decode else ()
    if note is None:
        raise ApiError(
            403,
            f"{PREFILL_HEADER} is for routers that this server trusts: start both with the same "
            f"admin_key; a router signs what it says, as {ROUTE_HEADER}",
            code="prefill_forbidden",
        )
    if not is_decode:
        raise ApiError(
            400,
            f"{PREFILL_HEADER} is for decode servers: start this one with --role decode, or leave "
            "the header out",
            code="wrong_role",
        )
    try:
        return parse_peers(text)
    except ConfigError as error:
        raise invalid(None, f"{PREFILL_HEADER}: {redact(str(error))}") from None


def _hinted(hint: str | None, known: Collection[str]) -> Sequence[str]:
    """Whoever sends a hint may be anybody: it changes who of those that are there is asked first.
    Nothing is dialled for it, and nobody who is gone is remembered for longer."""
    named = f"tcp://{hint.strip().lower()}" if hint is not None else ""
    return (named, *(each for each in known if each != named)) if named in known else ()


class TenantCounts:
    """How many requests each tenant has in flight."""

    def __init__(self, most: int) -> None:
        """`most`: of one tenant; 0: any number."""
        self._most = most
        self._numbers: dict[str, int] = {}

    def enter(self, salt: str, count: int) -> None:
        """Raises ApiError."""
        name = tenant_of(salt)
        number = self._numbers.get(name, 0) + count
        if name and self._most and number > self._most:
            raise overloaded(
                f"this tenant has {number - count} requests in flight, of {self._most} "
                "(tenant_requests): try again later",
                "tenant_full",
            )
        self._numbers[name] = number

    def leave(self, salt: str, count: int) -> None:
        name = tenant_of(salt)
        self._numbers[name] -= count
        if not self._numbers[name]:
            del self._numbers[name]

    def __getitem__(self, name: str) -> int:
        return self._numbers.get(name, 0)

    @property
    def names(self) -> list[str]:
        return list(self._numbers)


_LARGE_BYTES = 256 * 1024
"""From here on parsing takes milliseconds, and is done in a thread."""

MAX_NAMES = 256
MAX_NAME_CHARS = 80
"""Names are a client's text."""

logger = logging.getLogger("quire.server")
Shape = TypeVar("Shape", bound=Body)


class UnknownFields(Protocol):
    def note(self, body: BaseModel) -> None: ...


async def read_body(
    request: Request, shape: type[Shape], unknown: UnknownFields | None = None
) -> Shape:
    """Fields that the shape does not have go to `unknown`; None: they are wrong.
    Raises ApiError."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        # Also what keeps web pages of others out: a browser asks before it sends JSON elsewhere.
        raise ApiError(415, "send the body as JSON, with 'Content-Type: application/json'")
    try:
        body = await request.body()
    except ClientDisconnect:
        raise client_closed() from None

    def read() -> Shape:
        return shape.model_validate_json(body, extra=None if unknown is None else "allow")

    try:
        found = read() if len(body) < _LARGE_BYTES else await asyncio.to_thread(read)
    except ValidationError as error:
        raise from_validation(error) from None
    if unknown is not None:
        unknown.note(found)
    return found


class Unnamed:
    """For a look at a request that is not answered: whoever answers it names them."""

    def note(self, body: BaseModel) -> None:
        pass


class Warned:
    def __init__(self) -> None:
        self._warned: set[str] = set()

    def note(self, body: BaseModel) -> None:
        for name in extra_fields(body):
            if len(self._warned) >= MAX_NAMES:
                return
            shown = name[:MAX_NAME_CHARS]
            if shown in self._warned:
                continue
            self._warned.add(shown)
            logger.warning("field %r of a request is not known, and ignored", shown)
            if len(self._warned) == MAX_NAMES:
                logger.warning("more fields that are not known will not be named")


def extra_fields(body: BaseModel) -> Iterator[str]:
    """Names that the shape does not have, there and in what it holds."""
    yield from body.model_extra or ()
    for value in body.__dict__.values():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, BaseModel):
                break  # lists hold one kind
            yield from extra_fields(each)
