"""What clients say to a server: sessions of several turns, made up or recorded.

    synthetic   a shared system prompt, then rounds of new text, each after the server's answer
    agent       recorded requests, each with the whole history of its session and its tools; a
                line of a file is one, as it was sent to /v1/chat/completions:
                {"messages": […], "tools": […], "session_id": …, "timestamp": …}, of which all but
                the messages may be missing
    mtbench     questions in two turns; a line is {"question_id": …, "turns": […]}

Knows characters; how many make a token on the served model is given.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.bench import Json
from quire.bench.jsonlines import read_rows, wrong_line
from quire.bench.prose import Prose
from quire.errors import ConfigError


class ChatWorkload(enum.Enum):
    SYNTHETIC = "synthetic"
    AGENT = "agent"
    MTBENCH = "mtbench"


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
    opening: list[Json] = field(default_factory=list)
    """Said before the first turn."""


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


def synthetic(shape: Shape, chars_per_token: float, seed: int) -> list[ChatSession]:
    prose = Prose(seed)
    system = prose.passage(round(shape.system_tokens * chars_per_token))
    opening = [{"role": "system", "content": system}] if shape.system_tokens else []
    num_chars = round(shape.prompt_tokens * chars_per_token)
    return [
        ChatSession(
            f"session {i}",
            [_said(prose.passage(num_chars), shape) for _ in range(shape.num_rounds)],
            opening,
        )
        for i in range(shape.num_sessions)
    ]


def recorded(workload: ChatWorkload, place: Path | None, shape: Shape) -> list[ChatSession]:
    """Of a file, or of the *.jsonl of a directory, as many as are wanted. Raises ConfigError."""
    if place is None:
        raise ConfigError(
            f"--workload {workload.value} replays recordings: give --sessions, a directory of "
            "*.jsonl files, or one file"
        )
    read = _sessions_of if workload is ChatWorkload.AGENT else _questions_of
    paths = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
    sessions = [session for path in paths for session in read(path, shape)]
    if not sessions:
        raise ConfigError(f"there are no sessions in {str(place)!r}: check --sessions")
    return sessions[: shape.num_sessions]


def text_of(turn: ChatTurn) -> str:
    """All that it says, in about the form that it has in a request."""
    return json.dumps([turn.messages, turn.tools], ensure_ascii=False)


def _questions_of(path: Path, shape: Shape) -> Iterator[ChatSession]:
    for number, row in read_rows(path):
        if "question_id" not in row or not row.get("turns"):
            raise wrong_line(path, number, "lacks one of question_id, turns")
        if not isinstance(row["turns"], list) or not all(isinstance(t, str) for t in row["turns"]):
            raise wrong_line(path, number, "has turns that are not a list of texts")
        turns = [_said(text, shape) for text in row["turns"][: shape.num_rounds]]
        yield ChatSession(f"question {row['question_id']}", turns)


def _sessions_of(path: Path, shape: Shape) -> Iterator[ChatSession]:
    """By `session_id`; a file without any is one session."""
    sessions: dict[str, list[Json]] = {}
    for number, row in read_rows(path):
        if not _is_chat(row.get("messages")) or not isinstance(row.get("tools") or [], list):
            raise wrong_line(path, number, "has no messages that are a chat")
        session = row.get("session_id")
        sessions.setdefault(path.stem if session is None else str(session), []).append(row)
    for name, rows in sessions.items():
        try:
            rows.sort(key=lambda row: row.get("timestamp") or 0)
        except TypeError:
            raise ConfigError(
                f"{path}: the timestamps of session {name!r} cannot be compared: give each line "
                "one of the same kind, or none"
            ) from None
        turns = [
            ChatTurn(
                row["messages"],
                shape.output_tokens,
                is_whole_history=True,
                tools=row.get("tools") or [],
            )
            for row in rows[: shape.num_rounds]
        ]
        yield ChatSession(name, turns)


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(each, dict) and "role" in each for each in messages)
    )


def _said(content: str, shape: Shape) -> ChatTurn:
    return ChatTurn([{"role": "user", "content": content}], shape.output_tokens)
