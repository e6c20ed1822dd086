"""Framed: text, and calls that an opening marker announces. Most formats are one of these.

            ┌────────── other text ──────────┐
            ▼                                │
    OUTSIDE ──opening──▶ BODY ──its end──▶ AFTER ──opening, or a separator──▶ BODY
            ◀─ no call: as text ─┘

OUTSIDE passes text on at once; BODY holds it back; AFTER drops white space and the closing marker.
An answer that may begin with a call unannounced starts in AFTER.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.text.tools.base import (
    MAX_CALL_CHARS,
    Call,
    Malformed,
    NotACall,
    Reason,
    Text,
    TextEvent,
)
from quire.text.tools.calls import calls_of
from quire.text.tools.scanning import JsonExtent, first_marker, held_back


class CallBody(Protocol):
    """What stands behind one opening."""

    def push(self, text: str) -> int | None:
        """Characters of `text` that belong to it, once it has ended. Raises NotACall."""

    def calls(self) -> list[Call]:
        """Also when it has not ended and nothing more comes. Raises NotACall."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    opening: str
    body: Callable[[str], CallBody]
    """Given the opening it was found behind; "" if there was none."""
    closing: str = ""
    glue: str = ""
    """What templates write before an opening; it is no part of the text."""
    bare: str = ""
    """An answer that begins with one of these characters begins with a body."""
    separators: str = ""
    """Any of these between two bodies, the second without an opening (if it begins as `bare`)."""


class _State(enum.Enum):
    OUTSIDE = enum.auto()
    BODY = enum.auto()
    AFTER = enum.auto()


class Framed:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._markers = [frame.opening] + ([frame.glue + frame.opening] if frame.glue else [])
        self._state = _State.AFTER if frame.bare else _State.OUTSIDE
        self._is_closed = False  # since the last body
        self._is_start = True  # nothing but white space so far
        self._buffer = ""
        self._body: CallBody | None = None
        self._raw: list[str] = []
        self._num_raw = 0

    def push(self, text: str) -> list[TextEvent]:
        self._buffer += text
        events: list[TextEvent] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[TextEvent]:
        events: list[TextEvent] = []
        while self._state is _State.BODY:  # each time behind another opening
            self._end_body(events)
            while self._advance(events):
                pass
        rest, self._buffer = self._buffer, ""
        if self._state is _State.AFTER and not self._is_start:
            is_end = self._frame.closing.startswith(rest.lstrip())
            rest = "" if is_end else rest
        return events + ([Text(rest)] if rest else [])

    def _advance(self, events: list[TextEvent]) -> bool:
        """Whether there is more to do with what is here."""
        match self._state:
            case _State.OUTSIDE:
                return self._outside(events)
            case _State.BODY:
                return self._inside(events)
            case _State.AFTER:
                return self._after()

    def _outside(self, events: list[TextEvent]) -> bool:
        found = first_marker(self._buffer, self._markers)
        if found is None:
            end = len(self._buffer) - held_back(self._buffer, self._markers)
        else:
            end = found[0]
        if end:
            events.append(Text(self._buffer[:end]))
            self._is_start = False
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        self._open(found[1], self._frame.opening)
        return True

    def _open(self, raw: str, opening: str) -> None:
        """`raw`, at the beginning of the buffer, opens a body."""
        self._buffer = self._buffer[len(raw) :]
        self._raw, self._num_raw = [raw], 0
        self._body = self._frame.body(opening)
        self._state = _State.BODY
        self._is_start = False

    def _inside(self, events: list[TextEvent]) -> bool:
        assert self._body is not None
        text, self._buffer = self._buffer, ""
        try:
            used = self._body.push(text)
        except NotACall as error:
            self._raw.append(text)
            return self._give_up(error.reason, events)
        end = len(text) if used is None else used
        self._raw.append(text[:end])
        self._num_raw += end
        self._buffer = text[end:]
        if self._num_raw > MAX_CALL_CHARS:
            return self._give_up(Reason.TOO_LONG, events)
        if used is None:
            return False
        self._end_body(events)
        return True

    def _end_body(self, events: list[TextEvent]) -> None:
        assert self._body is not None
        try:
            events += self._body.calls()
        except NotACall as error:
            self._give_up(error.reason, events)
            return
        self._state, self._body, self._is_closed = _State.AFTER, None, False

    def _give_up(self, reason: Reason, events: list[TextEvent]) -> bool:
        """What was taken for a call is text. Another may begin behind its opening.

        That is read again, which takes linear time all the same: a body of JSON ends at the next
        opening that is not in one of its strings, and what is in its strings is not in the strings
        of a body that begins there.
        """
        opening, *taken = self._raw
        events.append(Malformed(reason))
        if opening:
            events.append(Text(opening))
        self._buffer = "".join(taken) + self._buffer
        self._state, self._body = _State.OUTSIDE, None
        return bool(self._buffer)

    def _after(self) -> bool:
        frame = self._frame
        stripped = self._buffer.lstrip()
        if not stripped:
            return False
        if not self._is_start and frame.closing and not self._is_closed:
            if stripped.startswith(frame.closing):
                self._buffer = stripped[len(frame.closing) :]
                self._is_closed = True
                return True
            if frame.closing.startswith(stripped):
                return False
        return self._begin_again(stripped)

    def _begin_again(self, stripped: str) -> bool:
        frame = self._frame
        rest = stripped
        is_separated = not self._is_start and stripped[0] in frame.separators
        if is_separated:
            rest = stripped[1:].lstrip()
            if not rest:
                return False
        skipped = self._buffer[: len(self._buffer) - len(rest)]
        if rest.startswith(frame.opening):
            self._open(skipped + frame.opening, frame.opening)
            return True
        if frame.opening.startswith(rest):
            return False
        if (self._is_start or is_separated) and rest[0] in frame.bare:
            self._open(skipped, "")
            return True
        self._state = _State.OUTSIDE
        return True


class TextBody:
    """What stands before a closing marker, which is part of it; another opening before that makes
    it none."""

    def __init__(self, opening: str, closing: str, read: Callable[[str, bool], list[Call]]) -> None:
        """`read`: of its text, and whether the closing was there. Raises NotACall."""
        self._opening = opening
        self._closing = closing
        self._read = read
        self._text = ""
        self._end: int | None = None

    def push(self, text: str) -> int | None:
        before = len(self._text)
        self._text += text
        again = self._text.find(self._opening, max(0, before - len(self._opening)))
        end = self._text.find(self._closing, max(0, before - len(self._closing)))
        if again >= 0 and not 0 <= end <= again:
            raise NotACall(Reason.SYNTAX)
        if end < 0:
            return None
        self._end = end
        return end + len(self._closing) - before

    def calls(self) -> list[Call]:
        return self._read(self._text[: self._end], self._end is not None)


class JsonBody:
    """An object, or a list of them."""

    def __init__(self, read: Callable[[str], list[Call]] = calls_of, start: str = "{[") -> None:
        self._read = read
        self._start = start
        self._extent = JsonExtent()
        self._text: list[str] = []
        self._is_begun = False
        self._is_ended = False

    def push(self, text: str) -> int | None:
        skipped = 0
        if not self._is_begun:
            stripped = text.lstrip()
            if not stripped:
                return None
            if stripped[0] not in self._start:
                raise NotACall(Reason.NOT_JSON)
            self._is_begun = True
            skipped = len(text) - len(stripped)
        used = self._extent.push(text[skipped:])
        self._is_ended = used is not None
        end = None if used is None else skipped + used
        self._text.append(text[skipped:end])
        return end

    def calls(self) -> list[Call]:
        if not self._is_ended:
            raise NotACall(Reason.UNFINISHED)
        return self._read("".join(self._text))
