"""What /openapi.json says beside what the routes say of themselves: errors, keys, names of models.

Knows this server's configuration, so that whoever makes requests from the document (a client, a
test) makes some that are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.bodies import describe_error, schemas
from quire.server.config import ServerConfig

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; server-sent events if `stream` is true",
        "content": {"text/event-stream": {}},
    }
}
"""For a route's `responses`."""
_NAMED = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "TokenizeRequest")
_CLOSED = {"FlushRequest", "StoreRequest"}
"""Whoever asks for these means every word."""
_URL = "Of a store, such as file:///mnt/kv?max=200GB, redis://host:6379 or memory://"


def described(
    document: dict[str, Any], names: Sequence[str], config: ServerConfig
) -> dict[str, Any]:
    """FastAPI's document, completed. `names`: of the models served."""
    components = schemas()
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
            operation["responses"].pop("422", None)  # FastAPI's form, not ours
            operation["responses"]["default"] = describe_error()
            if _needs_key(path, operation, config):
                operation["security"] = [{"key": []}]
    return document


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
