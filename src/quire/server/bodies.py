"""Reading a request's JSON body into one of the shapes of requests.py and responses/fields.py.

Fields that nobody knows are ignored, and named in the log once each: clients send fields of other
servers, and newer ones of OpenAI's. Knows shapes, nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from quire.text.shapes import Body
from quire.web.errors import ApiError, client_closed, from_validation

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
