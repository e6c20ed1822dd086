"""Recordings of a coding agent, kept as text, as the requests that `quire bench serve` replays.

    python benchmarks/agent_recordings.py FOLDER OUT
    quire bench serve URL --workload agent --sessions OUT

A file of FOLDER is a session, a line {"timestamp": …, "input": …, "output": …}: all that was said
so far, and the answer. Answers with a command in a ```bash block become calls of a function, and
what came back their results, so that they are said in turns as agents do. The figures of
docs/agents.md are of such sessions.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

Json = dict[str, Any]

COMMAND = re.compile(r"```bash\n(.*?)\n```", re.DOTALL)
BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def requests(rows: list[Json]) -> list[Json]:
    ordered = sorted(rows, key=lambda row: row["timestamp"])
    if any(not COMMAND.search(row["output"]) for row in ordered[:-1]) or any(
        not after["input"].startswith(row["input"]) for row, after in pairwise(ordered)
    ):
        return [{"messages": [said("user", row["input"])]} for row in ordered]
    messages = [said("user", ordered[0]["input"])]
    found: list[Json] = [{"messages": list(messages), "tools": [BASH]}]
    for number, (row, after) in enumerate(pairwise(ordered)):
        messages += turn(number, row["output"], after["input"][len(row["input"]) :])
        found.append({"messages": list(messages), "tools": [BASH]})
    return found


def turn(number: int, output: str, result: str) -> list[Json]:
    command = COMMAND.search(output)
    assert command is not None
    name = f"call{number:05d}"
    arguments = json.dumps({"command": command[1]}, ensure_ascii=False)
    call = {"id": name, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    asked = said("assistant", output[: command.start()].strip()) | {"tool_calls": [call]}
    return [asked, said("tool", result) | {"tool_call_id": name}]


def said(role: str, content: str) -> Json:
    return {"role": role, "content": content}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        lines = [json.dumps(request, ensure_ascii=False) + "\n" for request in requests(rows)]
        (target / path.name).write_text("".join(lines))


if __name__ == "__main__":
    main()
