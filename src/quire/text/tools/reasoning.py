"""Reasoning apart from the answer, at its beginning: <think>…</think>, or what Gemma 4 has for it.

Also when the template has opened the block: then an answer begins within it. Line ends around the
block belong to the template, which writes them again when the turn comes back in a history.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quire.text.tools.base import Parser, Reasoning, TextEvent
from quire.text.tools.scanning import held_back


@dataclass(frozen=True)
class Bounds:
    opening: str
    closing: str
    tokens: tuple[str, ...]
    """Those of a model that knows it, which may be special."""


THINK = Bounds("<think>", "</think>", ("<think>", "</think>"))
CHANNEL = Bounds("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"))
KNOWN = (THINK, CHANNEL)


class _Place(enum.Enum):
    START = enum.auto()
    OPENED = enum.auto()
    """Line ends behind the opening."""
    INSIDE = enum.auto()
    CLOSED = enum.auto()
    """Line ends behind the closing."""
    ANSWER = enum.auto()


class Thinking:
    """What is not reasoning goes on to another parser."""

    def __init__(self, rest: Parser, *, is_open: bool, bounds: Bounds = THINK) -> None:
        self._rest = rest
        self._bounds = bounds
        self._closings = ("\n" + bounds.closing, bounds.closing)
        self._place = _Place.OPENED if is_open else _Place.START
        self._buffer = ""

    def push(self, text: str) -> list[TextEvent]:
        if self._place is _Place.ANSWER:
            return self._rest.push(text)
        self._buffer += text
        events: list[TextEvent] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[TextEvent]:
        events: list[TextEvent] = []
        rest, self._buffer = self._buffer, ""
        if self._place is _Place.START and rest:
            events += self._rest.push(rest)
        elif self._place is _Place.INSIDE and rest:
            events.append(Reasoning(rest))
        return events + self._rest.finish()

    def _advance(self, events: list[TextEvent]) -> bool:
        """Whether there is more to do with what is here."""
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.OPENED:
                return self._skip(_Place.INSIDE)
            case _Place.INSIDE:
                return self._inside(events)
            case _Place.CLOSED:
                return self._skip(_Place.ANSWER)
            case _Place.ANSWER:
                text, self._buffer = self._buffer, ""
                events += self._rest.push(text)
                return False

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        opening = self._bounds.opening
        if text.startswith(opening):
            self._buffer = text.removeprefix(opening)
            self._place = _Place.OPENED
            return True
        if opening.startswith(text):
            return False
        self._place = _Place.ANSWER
        return True

    def _skip(self, then: _Place) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if not self._buffer:
            return False
        self._place = then
        return True

    def _inside(self, events: list[TextEvent]) -> bool:
        closing = self._bounds.closing
        at = self._buffer.find(closing)
        if at >= 0:
            before = self._buffer[:at].rstrip("\n")
            self._buffer = self._buffer[at + len(closing) :]
            self._place = _Place.CLOSED
        else:
            end = len(self._buffer) - held_back(self._buffer, self._closings)
            end = len(self._buffer[:end].rstrip("\n"))
            before, self._buffer = self._buffer[:end], self._buffer[end:]
        if before:
            events.append(Reasoning(before))
        return at >= 0
