"""How each family of models writes calls, the other way round; and calls to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from quire.text.tools import formats
from quire.text.tools.base import TextEvent, Tools, merged

Written = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""

NAMES = ("get_weather", "search", "f", "run-it", "ns.do_2")
TOOLS: Tools = {name: {"type": "object", "properties": {}} for name in NAMES}

_texts = st.text(max_size=12) | st.sampled_from(
    [
        '"',
        "\\",
        "}",
        "]}",
        "<tool_call>",
        "</tool_call>",
        "\n",
        "[TOOL_CALLS]",
        "```",
        "é\u2028",
        "😀",
    ]
)
_scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | _texts
_values = st.recursive(
    _scalars | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_keys = st.text(alphabet="abcxyz_", min_size=1, max_size=6)


def written(names: Sequence[str] = NAMES, values: st.SearchStrategy[Any] = _values) -> Any:
    one = st.tuples(st.sampled_from(names), st.dictionaries(_keys, values, max_size=3))
    return st.lists(one, min_size=1, max_size=3)


def _json(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes(calls: Sequence[Written]) -> str:
    return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)


def llama(calls: Sequence[Written]) -> str:
    return "; ".join(_json(*call, key="parameters") for call in calls)


def tagged_llama(calls: Sequence[Written]) -> str:
    return "<|python_tag|>" + llama(calls)


def mistral(calls: Sequence[Written]) -> str:
    return "[TOOL_CALLS][" + ", ".join(_json(*call) for call in calls) + "]"


def newer_mistral(calls: Sequence[Written]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)


def generic(calls: Sequence[Written]) -> str:
    return "[" + ",\n".join(_json(*call) for call in calls) + "]"


def fenced(calls: Sequence[Written]) -> str:
    return f"```json\n{generic(calls)}\n```"


def harmony(calls: Sequence[Written]) -> str:
    head = "<|channel|>commentary to=functions."
    return "<|end|><|start|>assistant".join(
        f"{head}{name} <|constrain|>json<|message|>{json.dumps(given)}" for name, given in calls
    )


def curly(opening: str, closing: str, quote: str) -> Callable[[Sequence[Written]], str]:
    def value(given: Any) -> str:
        match given:
            case str():
                return f"{quote}{given}{quote}"
            case list():
                return "[" + ",".join(map(value, given)) + "]"
            case dict():
                return "{" + ",".join(f"{value(k)}:{value(v)}" for k, v in given.items()) + "}"
        return json.dumps(given)

    return lambda calls: "".join(
        f"{opening}call:{name}{{{','.join(f'{k}:{value(v)}' for k, v in given.items())}}}{closing}"
        for name, given in calls
    )


def code(calls: Sequence[Written]) -> str:
    lines = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls
    ]
    return "```tool_code\n" + "\n".join(lines) + "\n```"


def xml(calls: Sequence[Written]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    )


class Case(NamedTuple):
    format: str
    write: Callable[[Sequence[Written]], str]
    calls: Any = written()
    leads: bool = True
    """Text may stand before the calls."""


def _without(*parts: str) -> st.SearchStrategy[Any]:
    return _values.filter(lambda value: not any(p in json.dumps(value) for p in parts))


_words = st.text(st.characters(exclude_characters="<>\r"), max_size=9).map(str.strip)
IDENTIFIERS = ("get_weather", "search", "ns.do_2")

CASES = {
    "hermes": Case("hermes", hermes),
    "llama": Case("llama3", llama, leads=False),
    "tagged_llama": Case("llama3", tagged_llama),
    "mistral": Case("mistral", mistral),
    "newer_mistral": Case("mistral-args", newer_mistral),
    "json": Case("json", generic, leads=False),
    "fenced": Case("json", fenced),
    "harmony": Case("harmony", harmony, leads=False),
    "functiongemma": Case(
        "functiongemma", curly("<start_function_call>", "<end_function_call>", "<escape>")
    ),
    "gemma4": Case("gemma4", curly("<|tool_call>", "<tool_call|>", '<|"|>')),
    "tool_code": Case("tool_code", code, written(IDENTIFIERS, _without("```"))),
    "qwen-xml": Case("qwen-xml", xml, written(values=_words)),
}


def parsed(format: str, pieces: Sequence[str], tools: Tools = TOOLS) -> list[TextEvent]:
    """What comes of an answer that arrives in these pieces."""
    parser = formats()[format].parser(tools)
    events: list[TextEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return merged(events + parser.finish())
