"""Any JSON: the answer begins with an object or a list of them, or has one in a ```json fence.

For models of no known family. Only the names of the request's functions make it a call.
"""

from __future__ import annotations

import functools
import json

from quire.text.tools.base import Parser, Plain, ToolFormat, Tools
from quire.text.tools.calls import calls_of
from quire.text.tools.framed import Frame, Framed, JsonBody

FENCE = "```"


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()
    known = functools.partial(calls_of, known=frozenset(tools))
    frame = Frame(
        opening=f"{FENCE}json",
        body=lambda _: JsonBody(known),
        closing=FENCE,
        bare="{[",
        separators=";,",
    )
    return Framed(frame)


def opening(name: str | None) -> str:
    return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "arguments":'


FORMAT = ToolFormat(name="json", parser=parser, opening=opening, ending="}", rank=90)
