"""What a parser of answers is: text in, events out. And what a format says of itself.

    push("…") ─▶ Text, Reasoning     as it comes, held back only while it may begin a marker
                 Call                whole, when the last character of the call is there
                 Malformed           a call that is none: its text follows, as Text

What comes out does not depend on how the text was cut: texts of one kind may be cut elsewhere, and
that is all. A parser never raises, and takes time linear in what it is given.

Knows nothing of tokens, of HTTP or of OpenAI's JSON.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MAX_CALL_CHARS = 1 << 18
"""What is longer is not a call."""

Tools = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: name → JSON schema of the arguments."""


class Reason(enum.StrEnum):
    """Why something that began like a call is none."""

    UNFINISHED = "unfinished"
    NOT_JSON = "not_json"
    NO_NAME = "no_name"
    NO_ARGUMENTS = "no_arguments"
    """They are there, but no object."""
    UNKNOWN_FUNCTION = "unknown_function"
    """Only where nothing but the name tells a call from other JSON."""
    SYNTAX = "syntax"
    """Of a format that is not JSON."""
    TOO_LONG = "too_long"


class NotACall(Exception):
    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object, as the model wrote it where it wrote JSON."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """For whoever counts: the text itself follows."""

    reason: Reason


TextEvent = Text | Reasoning | Call | Malformed


class Parser(Protocol):
    def push(self, text: str) -> list[TextEvent]: ...

    def finish(self) -> list[TextEvent]:
        """The rest. Nothing may be pushed afterwards."""


class Plain:
    """Everything is text."""

    def push(self, text: str) -> list[TextEvent]:
        return [Text(text)] if text else []

    def finish(self) -> list[TextEvent]:
        return []


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How one family of models writes calls."""

    name: str
    parser: Callable[[Tools], Parser]
    """Without tools it finds no calls."""
    opening: Callable[[str | None], str]
    """What an answer begins with that must be a call: of this function, or of any."""
    ending: str | None = None
    """What stands behind the arguments of a call, where these are JSON; None: they are not."""
    between: str | None = None
    """What stands between two such calls; None: there are no two."""
    trigger: str = ""
    """What announces such a call in the middle of text, and begins it."""
    text_opening: str = ""
    """What an answer begins with that is text."""
    thought: tuple[str, str] | None = None
    """What stands around reasoning before that, in this format alone."""
    signs: Sequence[str] = ()
    """Any of these in a model's template, or among its special tokens, says that it is this one."""
    rank: int = 50
    """Of several that it could be, the lowest."""
    markers: Sequence[str] = ()
    """Special tokens whose text the parser must see; others are dropped."""
    always: bool = False
    """Answers without tools are written in it too."""
    new_id: Callable[[], str] = openai_id
    """Of a call. Some templates take only their own kind."""


def merged(events: Sequence[TextEvent]) -> list[TextEvent]:
    """The same, neighbouring texts of one kind joined."""
    found: list[TextEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        else:
            found.append(event)
    return found
