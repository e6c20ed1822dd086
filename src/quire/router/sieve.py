"""What a server says, as far as a client gets to see it. A server that is not what it should be can
answer wrongly; it cannot say more than an answer.

Knows statuses, errors and JSON; no sockets. Whole answers are JSON objects, events are JSON objects
on one line, errors have our form, and of headers there are two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.web.errors import ApiError

MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 4 << 20
"""More is no answer, and is not kept in memory."""

_STATUSES = {400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 501, 502, 503, 504}
_BAD_GATEWAY = 502
_MAX_MESSAGE_CHARS = 2000
_MAX_WAIT_S = 3600
_NAME = re.compile(r"[A-Za-z0-9_.\[\]-]{1,100}")


class NoAnswer(Exception):
    """It is not what a server of ours says."""


def answer_of(content: bytes) -> bytes:
    """A whole answer. Raises NoAnswer."""
    try:
        msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise NoAnswer from error
    return content


def event_of(data: bytes, chunk: dict[str, Any]) -> bytes:
    """An event's data, on one line: what begins another line would be an event of its own."""
    is_one_line = b"\n" not in data and b"\r" not in data
    return data if is_one_line else msgspec.json.encode(chunk)


def error_of(
    status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> ApiError:
    """A server's error, as ours. `headers`: those that came with it."""
    status = status if status in _STATUSES else _BAD_GATEWAY
    message = str(error.get("message") or "the server did not say what is wrong")
    shown = "".join(c if c.isprintable() else " " for c in message[:_MAX_MESSAGE_CHARS])
    kept = {}
    wait = (headers or {}).get("retry-after", "")
    if wait.isascii() and wait.isdigit() and len(wait) < len(str(_MAX_WAIT_S)) + 1:
        kept["Retry-After"] = str(min(int(wait), _MAX_WAIT_S))
    if status == 401:
        kept["WWW-Authenticate"] = "Bearer"
    return ApiError(
        status, shown, param=_name(error.get("param")), code=_name(error.get("code")), headers=kept
    )


def shown_name(text: str) -> str:
    """A name that a server gives itself or its model, where everybody sees it."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def _name(found: Any) -> str | None:
    return found if isinstance(found, str) and _NAME.fullmatch(found) else None
