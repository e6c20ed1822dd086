"""Searching text that is still coming: markers that may be half there, and where JSON ends.

Knows characters, nothing of calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.tools.base import NotACall, Reason

_BETWEEN = re.compile(r"[\s0-9+\-.eEtrufalsn,:]*")
"""What JSON has outside of brackets and strings."""
_IN_STRING = re.compile(r'[^"\\]*')


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The marker that begins first, and where."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else None


def held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


class JsonExtent:
    """Where a JSON object or list ends, looking at each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int | None:
        """Characters up to its end, if that is here. Raises NotACall at what JSON cannot hold."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                continue
            at = _end(_BETWEEN.match(text, at))
            if at == len(text):
                break
            char = text[at]
            at += 1
            if char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
            else:
                raise NotACall(Reason.NOT_JSON)
            if not self._depth:
                if self._in_string:  # a string by itself
                    raise NotACall(Reason.NOT_JSON)
                return at
        return None

    def _string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end(_IN_STRING.match(text, at))
        if at < len(text):
            self._is_escaped = text[at] == "\\"
            self._in_string = self._is_escaped
            at += 1
        return at


def _end(match: re.Match[str] | None) -> int:
    assert match is not None  # both patterns match the empty text
    return match.end()
