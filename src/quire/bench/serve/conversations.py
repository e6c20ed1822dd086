"""What clients say to a server: sessions of several turns, made up or recorded.

    synthetic   a shared system prompt, then rounds of new text, each after the server's answer
    agent       recorded requests, each with the whole history of its session and its tools; a
                line of a file is one, as it was sent to /v1/chat/completions:
                {"messages": […], "tools": […], "session_id": …, "timestamp": …}, of which all but
                the messages may be missing
    mtbench     questions in two turns; a line is {"question_id": …, "turns": […]}

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

from quire.bench.jsonlines import read_rows, wrong_line
from quire.bench.prose import Prose
from quire.errors import ConfigError


class ChatWorkload(enum.Enum):
    SYNTHETIC = "synthetic"
    AGENT = "agent"
    MTBENCH = "mtbench"


Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    messages: list[Json]
    max_tokens: int
    is_whole_history: bool = False
    """They already hold all that was said before: nothing is put in front of them."""
    tools: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ChatSession:
    name: str
    turns: list[ChatTurn]
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


@dataclass(frozen=True, slots=True)
class ChatPlan:
    sessions: list[ChatSession]
    cut: Cut = field(default_factory=Cut)


TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around the messages."""
_MARGIN = 1.1
"""Recorded text differs from place to place in how many characters make a token."""


def synthetic(shape: Shape, chars_per_token: float, seed: int) -> ChatPlan:
    prose = Prose(seed)
    system = prose.passage(round(shape.system_tokens * chars_per_token))
    num_chars = round(shape.prompt_tokens * chars_per_token)
    sessions = [
        ChatSession(
            f"session {i}",
            [_said(prose.passage(num_chars), shape) for _ in range(shape.num_rounds)],
            system if shape.system_tokens else None,
        )
        for i in range(shape.num_sessions)
    ]
    return ChatPlan(sessions)


def agent(place: Path, shape: Shape, chars_per_token: float, context: int | None) -> ChatPlan:
    """Recorded sessions, as far as they fit."""
    plan = ChatPlan([])
    for session in read_sessions(place, shape.output_tokens)[: shape.num_sessions]:
        wanted = session.turns[: shape.num_rounds]
        turns = [
            turn
            for turn in wanted
            if context is None
            or _MARGIN * len(text_of(turn)) / chars_per_token + TEMPLATE_TOKENS + turn.max_tokens
            <= context
        ]
        plan.cut.turns += len(wanted) - len(turns)
        plan.cut.sessions += len(turns) < len(wanted)
        if turns:
            plan.sessions.append(ChatSession(session.name, turns))
    if not plan.sessions:
        raise ConfigError(
            f"no recorded turn fits into {context} tokens: use a model with a longer context"
        )
    return plan


def typical_agent_text(place: Path, num_chars: int) -> str:
    """From the end of a session, where code and what commands printed is."""
    return text_of(read_sessions(place, 0)[0].turns[-1])[-num_chars:]


def mtbench(file: Path, shape: Shape) -> ChatPlan:
    sessions = []
    for number, row in read_rows(file):
        if "question_id" not in row or "turns" not in row:
            raise wrong_line(file, number, "lacks one of question_id, turns")
        turns = [_said(text, shape) for text in row["turns"][: shape.num_rounds]]
        sessions.append(ChatSession(f"question {row['question_id']}", turns))
    return ChatPlan(sessions[: shape.num_sessions])


def text_of(turn: ChatTurn) -> str:
    """All that it says, in about the form that it has in a request."""
    return json.dumps([turn.messages, turn.tools], ensure_ascii=False)


def read_sessions(place: Path, max_tokens: int) -> list[ChatSession]:
    """Of a file, or of all *.jsonl of a directory. Raises ConfigError."""
    paths = [place] if place.is_file() else sorted(place.glob("*.jsonl"))
    if not paths:
        raise ConfigError(f"there are no sessions (*.jsonl) in {str(place)!r}: check --sessions")
    return [session for path in paths for session in _sessions_of(path, max_tokens)]


def _sessions_of(path: Path, max_tokens: int) -> Iterator[ChatSession]:
    """By `session_id`; a file without any is one session."""
    sessions: dict[str, list[Json]] = {}
    for number, row in read_rows(path):
        if not _is_chat(row.get("messages")) or not isinstance(row.get("tools") or [], list):
            raise wrong_line(path, number, "has no messages that are a chat")
        sessions.setdefault(str(row.get("session_id", path.stem)), []).append(row)
    if not sessions:
        raise ConfigError(f"{path} holds no requests: check --sessions")
    for name, found in sessions.items():
        ordered = sorted(found, key=lambda row: row.get("timestamp", 0))
        yield ChatSession(
            name,
            [
                ChatTurn(
                    row["messages"],
                    max_tokens,
                    is_whole_history=True,
                    tools=row.get("tools") or [],
                )
                for row in ordered
            ],
        )


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(each, dict) and "role" in each for each in messages)
    )


def _said(content: str, shape: Shape) -> ChatTurn:
    return ChatTurn([{"role": "user", "content": content}], shape.output_tokens)
