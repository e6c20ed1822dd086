"""Qwen3-Coder: <tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>

Values are bare text, so the function's schema says what is a number and what only looks like one.
A value that holds </parameter> or </tool_call> cannot be told from its end: the format has no
escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.server.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.server.tools.calls import dumped
from quire.server.tools.framed import Frame, Framed

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class XmlBody:
    """Ends with the closing marker, which is part of it."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._end: int | None = None

    def push(self, text: str) -> int | None:
        before = len(self._text)
        self._text += text
        again = self._text.find(OPENING, max(0, before - len(OPENING)))
        end = self._text.find(CLOSING, max(0, before - len(CLOSING)))
        if again >= 0 and not 0 <= end < again:
            raise NotACall(Reason.SYNTAX)
        if end < 0:
            return None
        self._end = end
        return end + len(CLOSING) - before

    def calls(self) -> list[Call]:
        function = _FUNCTION.fullmatch(self._text[: self._end])
        if function is None:
            raise NotACall(Reason.UNFINISHED if self._end is None else Reason.SYNTAX)
        name, inner = function[1], function[2]
        properties = self._tools.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments: dict[str, Any] = {}
        at = 0
        while match := _PARAMETER.match(inner, at):
            at = match.end()
            arguments[match[1]] = _value(match[2], schemas.get(match[1]))
        if inner[at:].strip():
            raise NotACall(Reason.SYNTAX)
        return [Call(name, dumped(arguments))]


def _value(text: str, schema: Any) -> Any:
    """Text, where the schema takes text; else JSON, if it is."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds is None or kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()
    return Framed(Frame(opening=OPENING, body=lambda _: XmlBody(tools), glue="\n"))


def opening(name: str | None) -> str:
    return f"{OPENING}\n<function=" + ("" if name is None else f"{name}>")


FORMAT = ToolFormat(
    name="qwen-xml",
    parser=parser,
    opening=opening,
    signs=("<function=",),
    rank=38,
    markers=(OPENING, CLOSING),
)
