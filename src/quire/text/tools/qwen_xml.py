"""Qwen3-Coder: <tool_call><function=f><parameter=city>Rome</parameter></function></tool_call>

Values are bare text, so the function's schema says what is a number and what only looks like one.
A value that holds </parameter> or </tool_call> cannot be told from its end: the format has no
escapes.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from quire.text.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.text.tools.calls import dumped
from quire.text.tools.framed import Frame, Framed, TextBody

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read(text: str, is_closed: bool, tools: Tools) -> list[Call]:
    function = _FUNCTION.fullmatch(text)
    if function is None:
        raise NotACall(Reason.SYNTAX if is_closed else Reason.UNFINISHED)
    name, inner = function[1], function[2]
    properties = tools.get(name, {}).get("properties")
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

    def body(_: str) -> TextBody:
        return TextBody(OPENING, CLOSING, functools.partial(_read, tools=tools))

    return Framed(Frame(opening=OPENING, body=body, glue="\n"))


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
