"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or with newer tokenizers
[TOOL_CALLS]name[ARGS]{…}, where an id may stand between the two, behind [CALL_ID].
"""

from __future__ import annotations

import json
import re
import secrets
import string

from quire.text.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.text.tools.calls import arguments_of
from quire.text.tools.framed import CallBody, Frame, Framed, JsonBody

OPENING = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"

_ID_CHARS = 9
_ALPHABET = string.ascii_letters + string.digits
_HEAD = re.compile(r"\s*([\w.\-/]+?)\s*(?:\[CALL_ID\]\s*[\w\-]+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_MAX_HEAD_CHARS = 512


class NamedBody:
    """A list of calls, or a name and its arguments."""

    def __init__(self) -> None:
        self._head = ""
        self._name: str | None = None
        self._json: JsonBody | None = None

    def push(self, text: str) -> int | None:
        if self._json is not None:
            return self._json.push(text)
        before, self._head = len(self._head), self._head + text
        stripped = self._head.lstrip()
        if not stripped:
            return None
        if stripped[0] == "[":
            return self._begin(len(self._head) - len(stripped), before)
        brace = self._head.find("{")
        if max(brace, len(self._head) if brace < 0 else 0) > _MAX_HEAD_CHARS:
            raise NotACall(Reason.SYNTAX)
        if brace < 0:
            if OPENING in self._head:
                raise NotACall(Reason.SYNTAX)
            return None
        match = _HEAD.match(self._head[: brace + 1])
        if match is None:
            raise NotACall(Reason.SYNTAX)
        self._name = match[1]
        return self._begin(brace, before)

    def _begin(self, at: int, before: int) -> int | None:
        """The JSON begins at character `at`; `before` of them had come earlier."""
        name = self._name
        if name is None:
            self._json = JsonBody()
        else:
            self._json = JsonBody(lambda text: [Call(name, arguments_of(text))], start="{")
        used = self._json.push(self._head[at:])
        return None if used is None else at + used - before

    def calls(self) -> list[Call]:
        if self._json is None:
            raise NotACall(Reason.UNFINISHED)
        return self._json.calls()


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()

    def body(_: str) -> CallBody:
        return NamedBody()

    return Framed(Frame(opening=OPENING, body=body))


def opening(name: str | None) -> str:
    if name is None:
        return f'{OPENING}[{{"name":'
    return f'{OPENING}[{{"name": {json.dumps(name)}, "arguments":'


def newer_opening(name: str | None) -> str:
    return OPENING if name is None else f"{OPENING}{name}{ARGS}"


def new_id() -> str:
    """Its templates refuse others."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


_MARKERS = (OPENING, ARGS, CALL_ID)

FORMAT = ToolFormat(
    name="mistral",
    parser=parser,
    opening=opening,
    ending="}]",
    trigger=OPENING,
    signs=(OPENING,),
    rank=30,
    markers=_MARKERS,
    new_id=new_id,
)
NEWER = ToolFormat(
    name="mistral-args",
    parser=parser,
    opening=newer_opening,
    ending="",
    between="",
    trigger=OPENING,
    signs=(ARGS,),
    rank=25,
    markers=_MARKERS,
    new_id=new_id,
)
