"""Llama 3: the answer is {"name": …, "parameters": {…}}, after <|python_tag|> or not; several are
separated by semicolons. Without the tag only the names of the request's functions make it a call.
"""

from __future__ import annotations

import functools
import json

from quire.text.tools.base import Parser, Plain, ToolFormat, Tools
from quire.text.tools.calls import calls_of
from quire.text.tools.framed import Frame, Framed, JsonBody

TAG = "<|python_tag|>"


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()
    known = functools.partial(calls_of, known=frozenset(tools))

    def body(found: str) -> JsonBody:
        return JsonBody(calls_of if found else known, start="{")

    return Framed(Frame(opening=TAG, body=body, bare="{", separators=";"))


def opening(name: str | None) -> str:
    return '{"name":' if name is None else f'{{"name": {json.dumps(name)}, "parameters":'


FORMAT = ToolFormat(
    name="llama3",
    parser=parser,
    opening=opening,
    ending="}",
    between="; ",
    signs=(TAG, '"parameters": dictionary of argument name and its value'),
    rank=45,
    markers=(TAG,),
)
