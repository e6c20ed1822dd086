"""Passage: a stream of `/v1/responses`, passed on event by event.

Its events are numbered, and an answer is kept by the server that gave it: no other can go on in its
place. So a server that is lost in the middle of one is an error; before its first event it is not.
Knows the form of the events, no sockets; Transcript is the same for completions.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.router.transcript import Failed
from quire.web.errors import ApiError

_KIND = re.compile(r"[a-z_.]{1,100}")
_LAST = ("response.completed", "response.incomplete", "response.failed")


class Passage:
    def __init__(self) -> None:
        self.is_begun = False
        self.is_done = False
        self.said: list[int] = []
        """Never known: see Transcript."""
        self.name = ""
        """Of the response, once it has been told."""

    def replay(self) -> None:
        """Raises ApiError: it cannot be, once it has begun."""
        if self.is_begun:
            raise ApiError(
                503,
                "the server that was answering was lost: send the request again",
                code="stream_lost",
            )

    def take(self, event: bytes) -> bytes:
        """One event's data, in; the event to send on. Raises Failed, and msgspec.DecodeError for
        what is none."""
        found = msgspec.json.decode(event, type=dict[str, Any])
        if isinstance(found.get("error"), dict) and "type" not in found:
            raise Failed(found["error"])
        kind = found.get("type")
        if not isinstance(kind, str) or not _KIND.fullmatch(kind):
            raise msgspec.DecodeError("an event without a kind")
        self.name = self.name or name_of(found.get("response"))
        self.is_begun = True
        self.is_done = kind in _LAST
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(found))


def name_of(response: Any) -> str:
    """By which a response is known; empty: it has none."""
    name = response.get("id") if isinstance(response, dict) else None
    return name if isinstance(name, str) else ""
