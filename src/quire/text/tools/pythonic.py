"""Calls written as Python in a ```tool_code fence, as Gemma 3 is taught to: f(city="Rome", n=3)

Nothing is run: the text is read by `ast`, and arguments are literals. print(…) around a call is
what the model was shown, and is taken off. Arguments by position get their names from the schema.
"""

from __future__ import annotations

import ast
import functools
import warnings
from typing import Any

from quire.text.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.text.tools.calls import dumped
from quire.text.tools.framed import Frame, Framed, TextBody

OPENING = "```tool_code"
CLOSING = "\n```"
_MAX_CHARS = 1 << 16


def _read(text: str, is_closed: bool, tools: Tools) -> list[Call]:
    """Up to a line that begins with a fence."""
    code = text.strip()
    if not is_closed:
        raise NotACall(Reason.UNFINISHED)
    if not code or len(code) > _MAX_CHARS:
        raise NotACall(Reason.SYNTAX)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall(Reason.SYNTAX) from None
    found: list[Call] = []
    for statement in statements:
        if not isinstance(statement, ast.Expr):
            raise NotACall(Reason.SYNTAX)
        listed = statement.value
        for each in listed.elts if isinstance(listed, ast.List | ast.Tuple) else [listed]:
            found.append(_call(each, tools))
    if not found:
        raise NotACall(Reason.SYNTAX)
    return found


def _call(node: ast.expr, tools: Tools) -> Call:
    if not isinstance(node, ast.Call):
        raise NotACall(Reason.SYNTAX)
    name = ast.unparse(node.func)
    if name == "print" and name not in tools and len(node.args) == 1:
        return _call(node.args[0], tools)
    if name not in tools:
        name = name.removeprefix("default_api.")
    if not all(part.isidentifier() for part in name.split(".")):
        raise NotACall(Reason.NO_NAME)
    properties = list(tools.get(name, {}).get("properties") or {})
    if len(node.args) > len(properties):
        raise NotACall(Reason.NO_ARGUMENTS)
    arguments = dict(zip(properties, map(_literal, node.args), strict=False))
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise NotACall(Reason.NO_ARGUMENTS)
        arguments[keyword.arg] = _literal(keyword.value)
    return Call(name, dumped(arguments))


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise NotACall(Reason.NO_ARGUMENTS) from None
    return _plain(value)


def _plain(value: Any) -> Any:
    """`value` if JSON has it, with keys that are strings."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise NotACall(Reason.NO_ARGUMENTS)
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def parser(tools: Tools) -> Parser:
    if not tools:
        return Plain()

    def body(_: str) -> TextBody:
        return TextBody(OPENING, CLOSING, functools.partial(_read, tools=tools))

    return Framed(Frame(opening=OPENING, body=body, glue="\n"))


def opening(name: str | None) -> str:
    return f"{OPENING}\n" if name is None else f"{OPENING}\n{name}("


FORMAT = ToolFormat(name="tool_code", parser=parser, opening=opening, signs=(OPENING,), rank=35)
