"""What /openapi.json says beside what the routes say of themselves: errors, keys, names of models.

Knows this server's configuration, so that whoever makes requests from the document (a client, a
test) makes some that are answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from quire.server.config import ServerConfig
from quire.server.forms import TIMEOUT, TOKEN_ID
from quire.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    KeysRequest,
    PrefetchRequest,
    StoreRequest,
    TokenizeRequest,
)
from quire.server.responses.fields import ResponsesRequest
from quire.text.shapes import Body

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; server-sent events if `stream` is true",
        "content": {"text/event-stream": {}},
    }
}
"""For a route's `responses`."""
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
_NAMED = (
    "ChatRequest",
    "CompletionRequest",
    "ResponsesRequest",
    "TokenizeRequest",
    "DetokenizeRequest",
)
_CLOSED = {"FlushRequest", "StoreRequest"}
"""Whoever asks for these means every word."""
_URL = "Of a store, such as file:///mnt/kv?max=200GB, redis://host:6379 or memory://"


def describe_body(shape: type[Body]) -> dict[str, Any]:
    """For a route's openapi_extra."""
    schema = {"$ref": f"#/components/schemas/{shape.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def described(
    document: dict[str, Any], names: Sequence[str], config: ServerConfig, vocab_size: int
) -> dict[str, Any]:
    """FastAPI's document, completed. `names`: of the models served."""
    components = _schemas()
    for each in _within(components):
        if each.get("format") == TOKEN_ID:
            each |= {"minimum": 0, "maximum": vocab_size - 1}
        elif each.get("format") == TIMEOUT:
            each["maximum"] = config.request_timeout_s
    for shape in _NAMED:
        _name_models(components[shape]["properties"]["model"], names)
    components["StoreRequest"]["properties"]["url"] |= {
        "description": _URL,
        "pattern": "^[a-z0-9+]+://",
        "examples": ["memory://"],
    }
    if not config.strict:  # fields that nobody knows are ignored
        for name in components.keys() - _CLOSED:
            components[name].pop("additionalProperties", None)
    document["components"] = {
        "schemas": components,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"]["enum"] = list(names)
            operation["responses"].pop("422", None)  # FastAPI's form, not ours
            operation["responses"]["default"] = _describe_error()
            if _needs_key(path, operation, config):
                operation["security"] = [{"key": []}]
    return document


def _within(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a document."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _within(inner)


def _name_models(field: dict[str, Any], names: Sequence[str]) -> None:
    """`model` may be left out of some requests: then it is one of two forms."""
    forms = field.get("anyOf", [field])
    text = next(form for form in forms if form.get("type") == "string")
    text["enum"] = list(names)


def _needs_key(path: str, operation: dict[str, Any], config: ServerConfig) -> bool:
    if path.startswith("/admin"):
        return True
    return bool(config.api_key or config.tenant_keys) and "operation" not in operation.get(
        "tags", ()
    )


def _describe_error() -> dict[str, Any]:
    """For every route: the one form of an error."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": "An error", "content": {"application/json": {"schema": schema}}}


def _schemas() -> dict[str, Any]:
    """Every body's schema, for OpenAPI's components."""
    _, definitions = models_json_schema(
        [(shape, "validation") for shape in _BODIES], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = definitions["$defs"]
    return found | {"Error": _ERROR}
