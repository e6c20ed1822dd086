"""Hermes, Qwen and many others: <tool_call>{"name": …, "arguments": {…}}</tool_call>"""

from __future__ import annotations

import json

from quire.text.tools.base import Parser, Plain, ToolFormat, Tools
from quire.text.tools.framed import Frame, Framed, JsonBody

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()
    frame = Frame(opening=OPENING, body=lambda _: JsonBody(start="{"), closing=CLOSING, glue="\n")
    return Framed(frame)


def opening(name: str | None) -> str:
    if name is None:
        return f'{OPENING}\n{{"name":'
    return f'{OPENING}\n{{"name": {json.dumps(name)}, "arguments":'


FORMAT = ToolFormat(
    name="hermes",
    parser=parser,
    opening=opening,
    ending=f"}}\n{CLOSING}",
    between="\n",
    trigger=OPENING,
    signs=(OPENING,),
    rank=40,
    markers=(OPENING, CLOSING),
)
