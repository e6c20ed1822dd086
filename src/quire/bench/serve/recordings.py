"""Recorded sessions of agents, as requests to replay. A line of a file is one request, either of:

    {"messages": […], "tools": […]}                  as sent to /v1/chat/completions; `tools`,
                                                     `session_id` and `timestamp` may be missing
    {"timestamp": …, "input": …, "output": …}        text: all that was said so far, and the answer

Of the second kind, answers with a command in a ```bash block become calls of a function, and what
came back their results, so that they are said in turns as agents do. Knows files; no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

Json = dict[str, Any]

_COMMAND = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)
_BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    messages: list[Json]
    tools: list[Json]
    text: str
    """All that it says, without the form that it has in a request."""
    answer: str = ""
    """What was answered then."""

    @property
    def num_chars(self) -> int:
        """With that form: every turn has some, and so have its calls."""
        return len(json.dumps([self.messages, self.tools], ensure_ascii=False))


@dataclass(frozen=True, slots=True)
class Recording:
    name: str
    requests: list[RecordedRequest]


def read(place: Path) -> list[Recording]:
    """A file, or all *.jsonl of a directory. Raises ConfigError."""
    paths = [place] if place.is_file() else sorted(place.glob("*.jsonl"))
    if not paths:
        raise ConfigError(f"there are no sessions (*.jsonl) in {str(place)!r}: check --sessions")
    return [recording for path in paths for recording in _recordings(path)]


def rows(path: Path) -> Iterator[tuple[int, Json]]:
    """The objects of a file, with the numbers of their lines. Raises ConfigError."""
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
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number} is no object: check --sessions")
        yield number, row


def _recordings(path: Path) -> Iterator[Recording]:
    """By `session_id`; a file without any is one session."""
    sessions: dict[str, list[Json]] = {}
    for number, row in rows(path):
        if "messages" in row:
            if not _is_chat(row["messages"]) or not isinstance(row.get("tools") or [], list):
                raise ConfigError(f"{path}, line {number}: messages are no chat: check --sessions")
        elif not all(key in row for key in ("timestamp", "input", "output")):
            raise ConfigError(
                f"{path}, line {number} lacks messages, or one of timestamp, input, output: "
                "check --sessions"
            )
        sessions.setdefault(str(row.get("session_id", path.stem)), []).append(row)
    if not sessions:
        raise ConfigError(f"{path} holds no requests: check --sessions")
    for name, found in sessions.items():
        ordered = sorted(found, key=lambda row: row.get("timestamp", 0))
        chats = [row for row in ordered if "messages" in row]
        yield Recording(name, [_asked(row) for row in chats] if chats else _spoken(ordered))


def _is_chat(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(each, dict) and "role" in each for each in messages)
    )


def _asked(row: Json) -> RecordedRequest:
    messages, tools = row["messages"], row.get("tools") or []
    return RecordedRequest(messages, tools, json.dumps([messages, tools], ensure_ascii=False))


def _spoken(ordered: list[Json]) -> list[RecordedRequest]:
    if any(not _COMMAND.search(row["output"]) for row in ordered[:-1]) or any(
        not after["input"].startswith(row["input"]) for row, after in pairwise(ordered)
    ):
        return [
            RecordedRequest([_said("user", row["input"])], [], row["input"], row["output"])
            for row in ordered
        ]
    messages = [_said("user", ordered[0]["input"])]
    found = [RecordedRequest(list(messages), [_BASH], ordered[0]["input"], ordered[0]["output"])]
    for number, (row, after) in enumerate(pairwise(ordered)):
        messages += _turn(number, row["output"], after["input"][len(row["input"]) :])
        found.append(RecordedRequest(list(messages), [_BASH], after["input"], after["output"]))
    return found


def _turn(number: int, output: str, result: str) -> list[Json]:
    command = _COMMAND.search(output)
    assert command is not None
    name = f"call{number:05d}"
    arguments = json.dumps({"command": command[1]}, ensure_ascii=False)
    call = {
        "id": name,
        "type": "function",
        "function": {"name": "bash", "arguments": arguments},
    }
    said = _said("assistant", output[: command.start()].strip()) | {"tool_calls": [call]}
    return [said, _said("tool", result) | {"tool_call_id": name}]


def _said(role: str, content: str) -> Json:
    return {"role": role, "content": content}
