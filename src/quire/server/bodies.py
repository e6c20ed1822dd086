"""Reading a request's JSON body into one of protocol.py's shapes; and what OpenAPI says of it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from quire.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    KeysRequest,
    PrefetchRequest,
    StoreRequest,
    TokenizeRequest,
)
from quire.server.responses.protocol import ResponsesRequest
from quire.server.unknown import UnknownFields
from quire.text.shapes import Body
from quire.web.errors import ApiError, client_closed, from_validation

_LARGE_BYTES = 256 * 1024
"""From here on parsing takes milliseconds, and is done in a thread."""

_BODIES: tuple[type[Body], ...] = (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    KeysRequest,
    PrefetchRequest,
    ResponsesRequest,
    StoreRequest,
    TokenizeRequest,
)

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}

Shape = TypeVar("Shape", bound=Body)


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


def describe_body(shape: type[Body]) -> dict[str, Any]:
    """For a route's openapi_extra."""
    schema = {"$ref": f"#/components/schemas/{shape.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_error() -> dict[str, Any]:
    """For every route: the one form of an error."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}


def schemas() -> dict[str, Any]:
    """Every body's schema, for OpenAPI's components."""
    _, definitions = models_json_schema(
        [(shape, "validation") for shape in _BODIES], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = definitions["$defs"]
    return found | {"Error": _ERROR}
