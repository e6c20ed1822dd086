"""Every answer that is an error, in OpenAI's format: {"error": {message, type, param, code}}.

    400 invalid_request_error      401 authentication_error     403 permission_error
    404 not_found_error            405, 415                     408 timeout_error
    409 conflict_error             413, 431                     429 overloaded
    500 server_error               503 unavailable              504 timeout_error

An ApiError is raised anywhere below an endpoint and becomes the answer at the boundary; so does an
InputError of those who know no HTTP. Both are written for the client: no paths, no tracebacks, no
credentials.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from quire.errors import InputError

RETRY_AFTER_S = 1
CLIENT_CLOSED = 499
"""Never sent: for the metrics, when the client has gone."""

_MAX_PARAM_CHARS = 200
"""A field's name is the client's text: nothing of it is sent back at length."""

_SUBJECT = re.compile(r"^(Input|String|List|Tuple|Set|Dictionary|Value) should")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "overloaded",
    500: "server_error",
    503: "unavailable",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error. `message` says what is wrong and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                # A lone surrogate from a client's JSON or query could not be sent back.
                "message": _sendable(self.message),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else _sendable(self.param),
                "code": self.code,
            }
        }

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body())

    def response(self) -> Response:
        return Response(self.encoded(), self.status, self.headers, "application/json")


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_input(error: InputError) -> ApiError:
    return invalid(error.param, str(error), code=error.code)


def model_not_found(asked: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"the model {_short(asked)} is not served here: this server has {served!r}",
        param="model",
        code="model_not_found",
    )


def overloaded(message: str, code: str) -> ApiError:
    return ApiError(429, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def engine_gone(reason: str) -> ApiError:
    return ApiError(503, reason, code="engine_unavailable")


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down: try another one, or again later",
        code="shutting_down",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def wrong_role() -> ApiError:
    return ApiError(
        400,
        "this is a prefill server, which computes prompts for decode servers and answers nobody "
        "else: send the request to a decode server or to the router",
        code="wrong_role",
    )


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, code="timeout")


def client_closed() -> ApiError:
    return ApiError(CLIENT_CLOSED, "the client closed the connection")


def unexpected(request_id: str) -> ApiError:
    return ApiError(
        500,
        f"the server failed on this request; its log has the details under {request_id}",
        code="internal_error",
    )


def from_validation(error: ValidationError) -> ApiError:
    """The first thing wrong with a body, under the name of its field."""
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("param")
    param = _path([*first["loc"], *([inner] if inner else [])])
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return invalid(None, f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    if kind == "model_type" and param is None:
        return invalid(None, "the body must be a JSON object")
    if kind == "extra_forbidden":
        return invalid(
            param,
            f"unknown field {_short(param or '')}: leave it out; /openapi.json lists the fields",
            code="unknown_field",
        )
    if kind == "missing":
        return invalid(param, f"{param} is missing", code="missing_field")
    if kind == "unsupported":
        return invalid(param, f"{param} {message}", code="unsupported_field")
    code = "fields_disagree" if inner else None
    if kind in ("int_type", "wrong") and _is_whole(first["input"]):
        code = "not_an_integer"
    # Ours are written to follow the field's name; pydantic's own begin with what it is instead.
    message = _SUBJECT.sub("should", message).replace(" after validation", "")
    return invalid(param, message if param is None else f"{param} {message}", code=code)


def _is_whole(value: Any) -> bool:
    """1.0, or a list that has one: by JSON Schema an integer, and none here."""
    if isinstance(value, list):
        return any(map(_is_whole, value))
    return isinstance(value, float) and value.is_integer()


def _path(loc: Sequence[int | str]) -> str | None:
    """("messages", 0, "content") → messages.0.content"""
    return ".".join(map(str, loc))[:_MAX_PARAM_CHARS] or None


def _short(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "…")


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
