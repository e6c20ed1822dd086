"""What clients say to a server: sessions of several turns, made up or recorded.

    synthetic   a shared system prompt, then rounds of new text, each after the server's answer
    agent       recorded requests of coding agents, each with the whole history of its session
    mtbench     two-turn questions

Knows characters; how many make a token on the served model is given. What does not fit into the
model's context is left out here or, where that depends on answers, by the runner; both say so.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.text import Prose
from quire.errors import ConfigError


class Workload(enum.Enum):
    SYNTHETIC = "synthetic"
    AGENT = "agent"
    MTBENCH = "mtbench"


@dataclass(frozen=True, slots=True)
class Turn:
    content: str
    max_tokens: int
    is_whole_history: bool = False
    """The content already holds all that was said before: nothing is put in front of it."""


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    turns: list[Turn]
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How large things are, in tokens."""

    num_sessions: int = 8
    num_rounds: int = 5
    system_tokens: int = 512
    prompt_tokens: int = 256
    """New in each round."""
    output_tokens: int = 64
    """At most."""


@dataclass(slots=True)
class Cut:
    """What was left out, for the record."""

    turns: int = 0
    """Did not fit into the context."""
    sessions: int = 0
    """Lost at least one turn to the context."""
    answers: int = 0
    """Recorded longer than `output_tokens`."""


@dataclass(frozen=True, slots=True)
class Plan:
    sessions: list[Session]
    cut: Cut = field(default_factory=Cut)


TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around the messages."""
_MARGIN = 1.1
"""Recorded text differs from place to place in how many characters make a token."""


def synthetic(shape: Shape, chars_per_token: float, seed: int, text: Path | None = None) -> Plan:
    prose = Prose(seed, text)
    system = prose.passage(round(shape.system_tokens * chars_per_token))
    num_chars = round(shape.prompt_tokens * chars_per_token)
    sessions = [
        Session(
            f"session {i}",
            [Turn(prose.passage(num_chars), shape.output_tokens) for _ in range(shape.num_rounds)],
            system if shape.system_tokens else None,
        )
        for i in range(shape.num_sessions)
    ]
    return Plan(sessions)


def agent(folder: Path, shape: Shape, chars_per_token: float, context: int | None) -> Plan:
    """Files of one recorded session each: `timestamp`, `input` (all of it so far), `output`."""
    plan = Plan([])
    for path in _agent_files(folder)[: shape.num_sessions]:
        rows = _agent_rows(path)
        turns = []
        for row in rows[: shape.num_rounds]:
            tokens = _MARGIN * len(row["input"]) / chars_per_token
            tokens += TEMPLATE_TOKENS + shape.output_tokens
            if context is not None and tokens > context:
                continue
            plan.cut.answers += len(row["output"]) / chars_per_token > shape.output_tokens
            turns.append(Turn(row["input"], shape.output_tokens, is_whole_history=True))
        dropped = min(len(rows), shape.num_rounds) - len(turns)
        plan.cut.turns += dropped
        plan.cut.sessions += dropped > 0
        if turns:
            plan.sessions.append(Session(path.stem, turns))
    if not plan.sessions:
        raise ConfigError(
            f"no recorded turn fits into {context} tokens: use a model with a longer context"
        )
    return plan


def typical_agent_text(folder: Path, num_chars: int) -> str:
    """From the end of a session, where code and what commands printed is."""
    last: str = _agent_rows(_agent_files(folder)[0])[-1]["input"]
    return last[-num_chars:]


def _agent_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ConfigError(f"there are no sessions (*.jsonl) in {str(folder)!r}: check --sessions")
    return paths


def _agent_rows(path: Path) -> list[dict[str, Any]]:
    rows = list(_rows(path, ("timestamp", "input", "output")))
    if not rows:
        raise ConfigError(f"{path} holds no requests: check --sessions")
    return sorted(rows, key=lambda row: row["timestamp"])


def mtbench(file: Path, shape: Shape) -> Plan:
    """One question per line: `question_id`, `turns`."""
    sessions = []
    for row in _rows(file, ("question_id", "turns")):
        turns = [Turn(text, shape.output_tokens) for text in row["turns"][: shape.num_rounds]]
        sessions.append(Session(f"question {row['question_id']}", turns))
    return Plan(sessions[: shape.num_sessions])


def _rows(path: Path, keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r} ({error}): check --sessions") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: check --sessions") from error
        if not isinstance(row, dict) or any(key not in row for key in keys):
            raise ConfigError(
                f"{path}, line {number} lacks one of {', '.join(keys)}: check --sessions"
            )
        yield row
