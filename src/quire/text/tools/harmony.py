"""gpt-oss: an answer is messages in channels, with special tokens between their parts.

    <|channel|>analysis<|message|>…<|end|>                        reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>      text
    … <|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>    a call

The prompt ends in <|start|>assistant, so an answer begins in a head. The last token is the one that
ends the answer, which the engine keeps: an end that is missing is no fault.
"""

from __future__ import annotations

import enum
import re

from quire.text.tools.base import (
    MAX_CALL_CHARS,
    Call,
    Malformed,
    NotACall,
    Parser,
    Reason,
    Reasoning,
    Text,
    TextEvent,
    ToolFormat,
    Tools,
)
from quire.text.tools.calls import arguments_of
from quire.text.tools.scanning import first_marker, held_back

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
MARKERS = (*ENDS, CHANNEL, MESSAGE, CONSTRAIN)

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEAD_CHARS = 1024


class _Place(enum.Enum):
    HEAD = enum.auto()
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class HarmonyParser:
    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._place = _Place.HEAD
        self._function = ""
        self._head = ""
        """Of the call under way, to be put back before it if it is none."""
        self._held: list[str] = []
        self._num_held = 0
        self._buffer = ""

    def push(self, text: str) -> list[TextEvent]:
        self._buffer += text
        events: list[TextEvent] = []
        while self._read_head(events) if self._place is _Place.HEAD else self._read_body(events):
            pass
        return events

    def finish(self) -> list[TextEvent]:
        events: list[TextEvent] = []
        rest, self._buffer = self._buffer, ""
        if self._place is not _Place.HEAD:
            self._take(rest, events)
            self._end(events)
        elif rest.strip() and rest not in ENDS:
            events += [Malformed(Reason.UNFINISHED), Text(rest)]
        return events

    def _read_head(self, events: list[TextEvent]) -> bool:
        at = self._buffer.find(MESSAGE)
        if max(at, len(self._buffer) if at < 0 else 0) > _MAX_HEAD_CHARS or self._is_no_head():
            return self._begin_text(events)
        if at < 0:
            return False
        head = self._buffer[: at + len(MESSAGE)]
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and self._tools and recipient[1].startswith(_FUNCTIONS):
            self._function = recipient[1].removeprefix(_FUNCTIONS)
            return self._begin(head, _Place.CALL)
        is_reasoning = channel is not None and channel[1] == "analysis"
        return self._begin(head, _Place.REASONING if is_reasoning else _Place.TEXT)

    def _is_no_head(self) -> bool:
        """Whether what is here cannot become a head: a model that forgot to write one."""
        text = self._buffer.lstrip()
        heads = (CHANNEL, START, "to=", "assistant", *ENDS)
        return not any(text.startswith(each) or each.startswith(text) for each in heads)

    def _begin_text(self, events: list[TextEvent]) -> bool:
        """There is no head. A marker that is here is text, and ends nothing."""
        found = first_marker(self._buffer, ENDS)
        taken = 0
        if found is not None and not self._buffer[: found[0]].strip():
            taken = found[0] + len(found[1])
        self._place = _Place.TEXT
        self._take(self._buffer[:taken], events)
        self._buffer = self._buffer[taken:]
        return True

    def _begin(self, head: str, place: _Place) -> bool:
        self._buffer = self._buffer[len(head) :]
        self._place, self._head, self._held, self._num_held = place, head, [], 0
        return True

    def _read_body(self, events: list[TextEvent]) -> bool:
        found = first_marker(self._buffer, ENDS)
        end = found[0] if found else len(self._buffer) - held_back(self._buffer, ENDS)
        self._take(self._buffer[:end], events)
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        self._end(events)
        if found[1] != START:  # which is part of the next head
            self._buffer = self._buffer[len(found[1]) :]
        self._place = _Place.HEAD
        return bool(self._buffer)

    def _take(self, text: str, events: list[TextEvent]) -> None:
        if not text:
            return
        match self._place:
            case _Place.REASONING:
                events.append(Reasoning(text))
            case _Place.TEXT:
                events.append(Text(text))
            case _:
                self._held.append(text)
                self._num_held += len(text)

    def _end(self, events: list[TextEvent]) -> None:
        if self._place is not _Place.CALL:
            return
        text = "".join(self._held)
        try:
            if self._num_held > MAX_CALL_CHARS:
                raise NotACall(Reason.TOO_LONG)
            if not text.strip():
                raise NotACall(Reason.UNFINISHED)
            events.append(Call(self._function, arguments_of(text)))
        except NotACall as error:
            events += [Malformed(error.reason), Text(self._head + text)]


def parser(tools: Tools) -> Parser:
    return HarmonyParser(tools)


def opening(name: str | None) -> str:
    head = f"{CHANNEL}commentary to={_FUNCTIONS}"
    return head if name is None else f"{head}{name} {CONSTRAIN}json{MESSAGE}"


FORMAT = ToolFormat(
    name="harmony",
    parser=parser,
    opening=opening,
    ending="",
    text_opening=f"{CHANNEL}final{MESSAGE}",
    thought=(f"{CHANNEL}analysis{MESSAGE}", f"{ENDS[0]}{START}assistant"),
    signs=(CHANNEL,),
    rank=5,
    markers=MARKERS,
    always=True,
)
