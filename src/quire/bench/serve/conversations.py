"""What clients say to a server: sessions of several turns, made up or recorded.

    synthetic   a shared system prompt, then rounds of new text, each after the server's answer
    agent       recorded requests of agents, each with the whole history of its session and its
                tools (see recordings.py)
    mtbench     two-turn questions

Knows characters; how many make a token on the served model is given. What does not fit into the
model's context is left out here or, where that depends on answers, by the runner; both say so.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.prose import Prose
from quire.bench.serve import recordings
from quire.errors import ConfigError


class ChatWorkload(enum.Enum):
    SYNTHETIC = "synthetic"
    AGENT = "agent"
    MTBENCH = "mtbench"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    content: str
    max_tokens: int
    is_whole_history: bool = False
    """The content already holds all that was said before: nothing is put in front of it."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The same as a chat, if it is one."""
    tools: list[dict[str, Any]] = field(default_factory=list)


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
    answers: int = 0
    """Recorded longer than `output_tokens`."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    sessions: list[ChatSession]
    cut: Cut = field(default_factory=Cut)


TEMPLATE_TOKENS = 64
"""Room for what a chat template puts around the messages."""
_MARGIN = 1.1
"""Recorded text differs from place to place in how many characters make a token."""


def synthetic(
    shape: Shape, chars_per_token: float, seed: int, text: Path | None = None
) -> ChatPlan:
    prose = Prose(seed, text)
    system = prose.passage(round(shape.system_tokens * chars_per_token))
    num_chars = round(shape.prompt_tokens * chars_per_token)
    sessions = [
        ChatSession(
            f"session {i}",
            [
                ChatTurn(prose.passage(num_chars), shape.output_tokens)
                for _ in range(shape.num_rounds)
            ],
            system if shape.system_tokens else None,
        )
        for i in range(shape.num_sessions)
    ]
    return ChatPlan(sessions)


def agent(place: Path, shape: Shape, chars_per_token: float, context: int | None) -> ChatPlan:
    """Recorded sessions, as far as they fit."""
    plan = ChatPlan([])
    for recording in recordings.read(place)[: shape.num_sessions]:
        turns = []
        for request in recording.requests[: shape.num_rounds]:
            tokens = _MARGIN * request.num_chars / chars_per_token
            tokens += TEMPLATE_TOKENS + shape.output_tokens
            if context is not None and tokens > context:
                continue
            plan.cut.answers += len(request.answer) / chars_per_token > shape.output_tokens
            turns.append(
                ChatTurn(
                    request.text,
                    shape.output_tokens,
                    is_whole_history=True,
                    messages=request.messages,
                    tools=request.tools,
                )
            )
        dropped = min(len(recording.requests), shape.num_rounds) - len(turns)
        plan.cut.turns += dropped
        plan.cut.sessions += dropped > 0
        if turns:
            plan.sessions.append(ChatSession(recording.name, turns))
    if not plan.sessions:
        raise ConfigError(
            f"no recorded turn fits into {context} tokens: use a model with a longer context"
        )
    return plan


def typical_agent_text(place: Path, num_chars: int) -> str:
    """From the end of a session, where code and what commands printed is."""
    return recordings.read(place)[0].requests[-1].text[-num_chars:]


def mtbench(file: Path, shape: Shape) -> ChatPlan:
    """One question per line: `question_id`, `turns`."""
    sessions = []
    for number, row in recordings.rows(file):
        if "question_id" not in row or "turns" not in row:
            raise ConfigError(
                f"{file}, line {number} lacks one of question_id, turns: check --sessions"
            )
        turns = [ChatTurn(text, shape.output_tokens) for text in row["turns"][: shape.num_rounds]]
        sessions.append(ChatSession(f"question {row['question_id']}", turns))
    return ChatPlan(sessions[: shape.num_sessions])
