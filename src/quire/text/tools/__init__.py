"""Answers with calls and reasoning in them: which parser reads a model's.

    base.py        events, what a parser and a format are
    framed.py      the machine that most formats are; scanning.py, calls.py: what it uses
    hermes.py qwen_xml.py llama.py mistral.py gemma.py pythonic.py harmony.py generic.py
    reasoning.py   <think>…</think>, before any of them

Others are found through entry points of the group `quire.tool_parsers`: each a ToolFormat.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import entry_points

from quire.errors import ConfigError
from quire.text.tools import (
    gemma,
    generic,
    harmony,
    hermes,
    llama,
    mistral,
    pythonic,
    qwen_xml,
)
from quire.text.tools.base import (
    Call,
    Malformed,
    Parser,
    Plain,
    Reason,
    Reasoning,
    Text,
    TextEvent,
    ToolFormat,
    Tools,
)
from quire.text.tools.reasoning import Thinking

GROUP = "quire.tool_parsers"
AUTO, NONE = "auto", "none"

_OWN = (
    gemma.FORMAT,
    gemma.NEWER,
    generic.FORMAT,
    harmony.FORMAT,
    hermes.FORMAT,
    llama.FORMAT,
    mistral.FORMAT,
    mistral.NEWER,
    pythonic.FORMAT,
    qwen_xml.FORMAT,
)


def formats() -> Mapping[str, ToolFormat]:
    """Ours and those that are installed, by name. Raises ConfigError."""
    found = {each.name: each for each in _OWN}
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except Exception as error:  # somebody else's program
            raise ConfigError(f"tool parser {entry.name!r} cannot be loaded: {error}") from error
        if not isinstance(loaded, ToolFormat):
            raise ConfigError(f"tool parser {entry.name!r} is no ToolFormat")
        found[loaded.name] = loaded
    return found


def choose(option: str, template: str, special: Collection[str], *, native: bool) -> ToolFormat:
    """The format of a model's answers. `native`: its template knows tools; else we tell the model
    of them, and of the form we ask for. Raises ConfigError."""
    known = formats()
    if option != AUTO:
        if option not in known:
            listed = ", ".join(sorted(known))
            raise ConfigError(f"tool_parser {option!r} is not known: {listed}, auto or none")
        return known[option]
    suited = [
        each
        for each in known.values()
        if any(sign in template or sign in special for sign in each.signs)
        and (native or each.always)
    ]
    if suited:
        return min(suited, key=lambda each: (each.rank, each.name))
    return generic.FORMAT if native else hermes.FORMAT


__all__ = [
    "AUTO",
    "NONE",
    "Call",
    "Malformed",
    "Parser",
    "Plain",
    "Reason",
    "Reasoning",
    "Text",
    "TextEvent",
    "Thinking",
    "ToolFormat",
    "Tools",
    "choose",
    "formats",
]
