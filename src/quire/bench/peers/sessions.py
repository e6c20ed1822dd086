"""Recorded sessions as prompts that grow turn by turn. Knows files and a tokenizer.

A file of *.jsonl is one session, a line of it a turn with all that was said so far as `input`; or a
line is a session of its own, with what the user said as `turns`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.bench.jsonlines import read_rows, wrong_line
from quire.errors import ConfigError

PromptIds = list[int]
BEGINNING = 64
"""Tokens by which sessions are told apart: no two that are asked begin alike."""


def read_sessions(
    places: list[Path], tokenizer: Any, *, count: int, turns: int, max_tokens: int
) -> list[list[PromptIds]]:
    """So many sessions of so many turns at most, each of which begins with the one before it.
    Raises ConfigError."""
    found: dict[tuple[int, ...], list[PromptIds]] = {}
    for place in places:
        for path in sorted(place.glob("*.jsonl")) if place.is_dir() else [place]:
            for texts in _texts(path):
                session = _prompts(texts, tokenizer, max_tokens)[:turns]
                if len(session) > 1:
                    found.setdefault(tuple(session[0][:BEGINNING]), session)
    if not found:
        raise ConfigError(
            f"no session has two turns within {max_tokens} tokens: give --sessions files of JSON "
            "lines with `input` or `turns`"
        )
    return list(found.values())[:count]


def _texts(path: Path) -> Iterator[list[str]]:
    """By session, what is said up to each turn."""
    growing: list[str] = []
    for number, row in read_rows(path):
        if isinstance(row.get("turns"), list):
            said = [str(turn) for turn in row["turns"]]
            yield ["\n\n".join(said[: at + 1]) for at in range(len(said))]
        elif isinstance(row.get("input"), str):
            growing.append(row["input"])
        else:
            raise wrong_line(path, number, "has no input and no turns")
    growing.sort(key=len)
    if all(after.startswith(before) for before, after in pairwise(growing)):
        yield growing


def _prompts(texts: list[str], tokenizer: Any, max_tokens: int) -> list[PromptIds]:
    """Each goes on from the one before it, token by token too."""
    prompts: list[PromptIds] = []
    before = ""
    tokens: list[int] = []
    for text in texts:
        tokens = tokens + tokenizer(text[len(before) :], add_special_tokens=False)["input_ids"]
        if len(tokens) > max_tokens:
            break
        if text != before:
            prompts.append(tokens)
        before = text
    return prompts
