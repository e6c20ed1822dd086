"""Gemma's calls without JSON: call:name{key:value,…} between markers of its own.

    FunctionGemma   <start_function_call>call:f{city:<escape>Rome<escape>,n:3}<end_function_call>
    Gemma 4         <|tool_call>call:f{city:<|"|>Rome<|"|>,n:3}<tool_call|>

Strings stand between two equal quotes, which they cannot hold; there are no other escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.text.tools.base import Call, NotACall, Parser, Plain, Reason, ToolFormat, Tools
from quire.text.tools.calls import dumped
from quire.text.tools.framed import Frame, Framed

_HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^:{}\[\],<>\"]+?)\s*:")
_SCALAR = re.compile(r"\s*([^{}\[\],<>\"]+)")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class Marks:
    opening: str
    closing: str
    quote: str


FUNCTION_GEMMA = Marks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = Marks("<|tool_call>", "<tool_call|>", '<|"|>')


class CurlyBody:
    """Ends with the closing marker, which is part of it, outside of quotes."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._any = re.compile(
            "|".join(map(re.escape, (marks.quote, marks.closing, marks.opening)))
        )
        self._text = ""
        self._seen = 0  # characters before this are done with
        self._in_quotes = False
        self._end: int | None = None

    def push(self, text: str) -> int | None:
        before = len(self._text)
        self._text += text
        for found in self._any.finditer(self._text, self._seen):
            self._seen = found.end()
            if found[0] == self._marks.quote:
                self._in_quotes = not self._in_quotes
            elif self._in_quotes:
                continue
            elif found[0] == self._marks.opening:
                raise NotACall(Reason.SYNTAX)
            else:
                self._end = found.start()
                return found.end() - before
        longest = max(map(len, (self._marks.opening, self._marks.closing, self._marks.quote)))
        self._seen = max(self._seen, len(self._text) - longest + 1)
        return None

    def calls(self) -> list[Call]:
        head = _HEAD.match(self._text)
        if head is None:
            raise NotACall(Reason.UNFINISHED if self._end is None else Reason.SYNTAX)
        reader = _Reader(self._text[: self._end], head.end(), self._marks.quote)
        arguments = reader.value(0)
        if self._text[reader.at : self._end].strip():
            raise NotACall(Reason.SYNTAX)
        return [Call(head[1], dumped(arguments))]


class _Reader:
    """Values from left to right. Raises NotACall."""

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.at = at

    def value(self, depth: int) -> Any:
        self._skip()
        if depth > _MAX_DEPTH:
            raise NotACall(Reason.SYNTAX)
        if self._takes("{"):
            return dict(self._items("}", lambda: (self._key(), self.value(depth + 1))))
        if self._takes("["):
            return self._items("]", lambda: self.value(depth + 1))
        if self._takes(self._quote):
            end = self._text.find(self._quote, self.at)
            if end < 0:
                raise NotACall(Reason.UNFINISHED)
            found, self.at = self._text[self.at : end], end + len(self._quote)
            return found
        scalar = self._match(_SCALAR)
        try:
            return json.loads(scalar)
        except ValueError:
            return scalar  # a string without quotes

    def _items(self, end: str, item: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        self._skip()
        if self._takes(end):
            return items
        while True:
            items.append(item())
            self._skip()
            if self._takes(end):
                return items
            if not self._takes(","):
                raise NotACall(Reason.SYNTAX)

    def _key(self) -> str:
        self._skip()
        if self._takes(self._quote):
            self.at -= len(self._quote)
            key = self.value(0)
            self._skip()
            if not self._takes(":"):
                raise NotACall(Reason.SYNTAX)
            return str(key)
        return self._match(_KEY)

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at)
        if match is None:
            raise NotACall(Reason.SYNTAX)
        self.at = match.end()
        return match[1].strip()

    def _takes(self, token: str) -> bool:
        if not self._text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def _skip(self) -> None:
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1


def _format(name: str, marks: Marks, rank: int) -> ToolFormat:
    def parser(tools: Tools) -> Parser:
        if not tools:
            return Plain()
        return Framed(Frame(opening=marks.opening, body=lambda _: CurlyBody(marks)))

    def opening(function: str | None) -> str:
        return f"{marks.opening}call:" + ("" if function is None else f"{function}{{")

    return ToolFormat(
        name=name,
        parser=parser,
        opening=opening,
        signs=(marks.opening,),
        rank=rank,
        markers=(marks.opening, marks.closing, marks.quote),
    )


FORMAT = _format("functiongemma", FUNCTION_GEMMA, 10)
NEWER = _format("gemma4", GEMMA_4, 11)
