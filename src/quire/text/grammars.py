"""What an answer must follow, written as a grammar (llguidance's Lark) for the engine.

    response_format        [thought] JSON of the schema, or calls where tools may be called
    tool_choice: required  the rest of a call whose opening stands in the prompt, and further calls
    strict functions       text as it likes; behind what announces a call, a call by the schema

Arguments are held to their schema where the function is strict, else to being an object. Marks of a
format that are tokens of the model are written as these tokens. Knows formats and schemas; whether
a schema can be compiled at all the engine finds out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InputError
from quire.text.messages import Conversation, Tool
from quire.text.reading import Reading
from quire.text.tools import ToolFormat

MAX_SCHEMA_CHARS = 1 << 17
MAX_DEPTH = 64
_ANY_OBJECT = {"type": "object"}
_SPACE = r"[ \n\r\t]{1,32}"
"""Between two tokens of JSON: without a bound a model may never come to an end."""
_FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
"""Those that the library knows."""
_MOST = 10**15
_STEP = 1e-9
"""Numbers that a schema leaves open are held to this range and this many places: in JSON they have
as many digits as a model likes, and a small one may like them until it is cut off."""
_NUMERIC = {"integer", "number"}
_SAYS_MORE = {"multipleOf", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose members are schemas under names that are no keywords."""


def hold(
    reading: Reading,
    conversation: Conversation,
    schema: Mapping[str, Any] | None,
    *,
    is_thinking: bool,
    calls: bool,
    is_one_call: bool,
) -> str:
    """Of an answer to `conversation`, in which functions may be called if `calls`. Empty: it
    follows nothing. Raises InputError."""
    rules = _Rules(reading)
    tools = conversation.tools if calls else ()
    if conversation.must_call:
        return rules.calling(tools, conversation.function, is_one_call=is_one_call)
    if schema is not None:
        return rules.following(schema, tools, is_thinking=is_thinking, is_one_call=is_one_call)
    if any(tool.function.strict for tool in tools):
        return rules.among_text(tools)
    return ""


class _Rules:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._format: ToolFormat | None = reading.format
        self._marks = reading.mark_ids
        self._lines = [r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{1,4}/"]

    # ---- whole grammars -------------------------------------------------------------------------

    def calling(self, tools: Sequence[Tool], function: str | None, *, is_one_call: bool) -> str:
        """The prompt ends with the opening of a call."""
        form = self._format
        if form is None or form.ending is None:
            return ""
        begun = len(form.opening(function))
        named = [tool for tool in tools if function in (None, tool.function.name)]
        first = self._calls("first", form, named, begun)
        more = self._more(form, named, is_one_call=is_one_call)
        return self._whole(f"{first} {more}")

    def following(
        self,
        schema: Mapping[str, Any],
        tools: Sequence[Tool],
        *,
        is_thinking: bool,
        is_one_call: bool,
    ) -> str:
        form = self._format
        head = form.text_opening if form is not None else ""
        choices = [f"{self._text(head)} {self._json('answer', schema, 'response_format')}"]
        if tools and form is not None:
            if form.ending is None:
                choices.append(f"{self._text(form.opening(None))} TEXT")
            else:
                more = self._more(form, tools, is_one_call=is_one_call)
                choices.append(f"{self._calls('call', form, tools, 0)} {more}")
        self._lines.append("said: " + " | ".join(choices))
        return self._whole(f"{self._thought(is_thinking=is_thinking)} said")

    def among_text(self, tools: Sequence[Tool]) -> str:
        form = self._format
        if form is None or form.ending is None or not form.trigger:
            return ""
        call = self._calls("call", form, tools, len(form.trigger))
        pieces = [f"{self._until('head', form.trigger)} {call}"]
        pieces += [f"TEXT {self._text(mark)}" for mark in self._reading.thought_marks]
        self._lines.append("piece: " + " | ".join(pieces))
        return self._whole("piece* TEXT")

    # ---- parts ----------------------------------------------------------------------------------

    def _calls(self, name: str, form: ToolFormat, tools: Sequence[Tool], begun: int) -> str:
        """A rule for a call of any of these, of which `begun` characters are there already."""
        choices = []
        for i, tool in enumerate(tools):
            function = tool.function
            schema = (function.parameters or _ANY_OBJECT) if function.strict else _ANY_OBJECT
            arguments = self._json(f"{name}_{i}", schema, "tools")
            opening = self._text(form.opening(function.name)[begun:])
            choices.append(f'{opening} " "? {arguments} {self._text(form.ending or "")}')
        self._lines.append(f"{name}: " + " | ".join(choices))
        return name

    def _more(self, form: ToolFormat, tools: Sequence[Tool], *, is_one_call: bool) -> str:
        """Further calls, where the format has any."""
        if form.between is None or is_one_call:
            return ""
        further = self._calls("further", form, tools, 0)
        return f"({self._text(form.between)} {further})*"

    def _thought(self, *, is_thinking: bool) -> str:
        """What a model may think before it answers."""
        form, bounds = self._format, self._reading.bounds
        if form is not None and form.thought is not None:
            opening, closing = form.thought
        elif bounds is not None:
            opening, closing = bounds.opening, bounds.closing
        else:
            return ""
        rest = f"{self._until('thought', closing)} SPACE?"
        return rest if is_thinking else f"({self._text(opening)} {rest})?"

    def _until(self, name: str, text: str) -> str:
        """Anything up to the first `text`, and that."""
        if self._first_mark(text) == 0:
            return f"TEXT {self._text(text)}"
        self._lines.append(f"{name}[lazy]: TEXT {self._text(text)}")
        return name

    def _first_mark(self, text: str) -> int:
        return min((text.find(mark) for mark in self._marks if mark in text), default=-1)

    def _text(self, text: str) -> str:
        """This text and nothing else."""
        if not self._marks:
            return json.dumps(text) if text else ""
        parts = re.split("(" + "|".join(map(re.escape, self._marks)) + ")", text)
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part)
            for part in parts
            if part
        )

    def _json(self, name: str, schema: Mapping[str, Any], param: str) -> str:
        """A rule for JSON of this schema."""
        self._lines.append(json_rule(name, schema, param))
        return name

    def _whole(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def json_rule(name: str, schema: Mapping[str, Any], param: str) -> str:
    """The line of a grammar that says what `name` is: JSON of this schema. Raises InputError."""
    options = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}
    text = json.dumps(_known(schema, param) | {"x-guidance": options})
    if len(text) > MAX_SCHEMA_CHARS:
        raise InputError(
            param, f"{param} has a schema of more than {MAX_SCHEMA_CHARS} characters: too many"
        )
    return f"{name}: %json {text}"


def _known(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Without what says nothing: formats that the library does not know, which schemas may name as
    they like; and numbers with an end. Raises InputError."""

    def clean(value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise InputError(param, f"{param} has a schema nested deeper than {MAX_DEPTH}")
        if isinstance(value, list):
            return [clean(each, depth + 1) for each in value]
        if not isinstance(value, Mapping):
            return value
        found = {}
        for name, each in value.items():
            if name == "format" and each not in _FORMATS:
                continue
            if name in _MAPS and isinstance(each, Mapping):
                found[name] = {key: clean(inner, depth + 1) for key, inner in each.items()}
            elif name in ("enum", "const", "default", "examples"):
                found[name] = each
            else:
                found[name] = clean(each, depth + 1)
        return _with_an_end(found)

    cleaned: dict[str, Any] = clean(schema, 0)
    return cleaned


def _with_an_end(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of numbers whose digits come to an end. What somebody bounded within less than the
    step, or beyond the range, stays as it is."""
    kinds = schema.get("type")
    kinds = set(kinds) if isinstance(kinds, list) and all(map(_is_text, kinds)) else {str(kinds)}
    if not kinds & _NUMERIC or schema.keys() & _SAYS_MORE:
        return schema
    bounds = [schema[name] for name in _BOUNDS if name in schema]
    if any(not _is_number(bound) or abs(bound) >= _MOST for bound in bounds):
        return schema
    is_narrow = any(0 < abs(bound) < 1000 * _STEP for bound in bounds)
    step = {} if "number" not in kinds or is_narrow else {"multipleOf": _STEP}
    return {"minimum": -_MOST, "maximum": _MOST} | schema | step


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
