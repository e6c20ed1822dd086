"""Calls written as Python in a ```tool_code fence, as Gemma 3 is taught to: f(city="Rome", n=3)

Nothing is run: the text is read by `ast`, and arguments are literals. print(…) around a call is
what the model was shown, and is taken off. Arguments by position get their names from the schema.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any

from quire.server.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.server.tools.calls import dumped
from quire.server.tools.framed import Frame, Framed

OPENING = "```tool_code"
CLOSING = "\n```"
_MAX_CHARS = 1 << 16


class CodeBody:
    """Ends with a line that begins with a fence, which is part of it."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._end: int | None = None

    def push(self, text: str) -> int | None:
        before = len(self._text)
        self._text += text
        again = self._text.find(OPENING, max(0, before - len(OPENING)))
        end = self._text.find(CLOSING, max(0, before - len(CLOSING)))
        if again >= 0 and not 0 <= end <= again:
            raise NotACall(Reason.SYNTAX)
        if end < 0:
            return None
        self._end = end
        return end + len(CLOSING) - before

    def calls(self) -> list[Call]:
        if self._end is None:
            raise NotACall(Reason.UNFINISHED)
        code = self._text[: self._end].strip()
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
                found.append(self._call(each))
        if not found:
            raise NotACall(Reason.SYNTAX)
        return found

    def _call(self, node: ast.expr) -> Call:
        if not isinstance(node, ast.Call):
            raise NotACall(Reason.SYNTAX)
        name = ast.unparse(node.func)
        if name == "print" and name not in self._tools and len(node.args) == 1:
            return self._call(node.args[0])
        if name not in self._tools:
            name = name.removeprefix("default_api.")
        if not all(part.isidentifier() for part in name.split(".")):
            raise NotACall(Reason.NO_NAME)
        properties = list(self._tools.get(name, {}).get("properties") or {})
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
    return Framed(Frame(opening=OPENING, body=lambda _: CodeBody(tools), glue="\n"))


def opening(name: str | None) -> str:
    return f"{OPENING}\n" if name is None else f"{OPENING}\n{name}("


FORMAT = ToolFormat(name="tool_code", parser=parser, opening=opening, signs=(OPENING,), rank=35)
