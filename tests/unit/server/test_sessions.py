"""Recorded sessions of coding agents, replayed turn by turn: every turn finds all that the one
before it computed. Skipped where the recordings are not there."""

import itertools
import json
import re
from pathlib import Path

import pytest

from unit.server.scripted import MODEL, TEMPLATE
from unit.server.test_tools import NATIVE, TEXTUAL, rig_of

PLACE = Path(__file__).parents[4] / "shared/data/agent_sessions"
SESSIONS = sorted(PLACE.glob("*.jsonl")) or [None]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
MAX_TURNS = 8


def turns_of(path):
    """What was asked first; then for each turn what the model said, its command and its result."""
    rows = [json.loads(line) for line in path.read_text().splitlines()][:MAX_TURNS]
    turns = []
    for row, following in itertools.pairwise(rows):
        if not following["input"].startswith(row["input"]):
            break
        command = re.search(r"```bash\n(.*?)\n```", row["output"], re.DOTALL)
        text = row["output"].partition("```bash")[0].strip()
        turns.append((text, command[1] if command else "", following["input"][len(row["input"]) :]))
    return rows[0]["input"], turns


def written(text, command):
    """As a model of Hermes's kind writes it."""
    call = {"name": "bash", "arguments": {"command": command}}
    block = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return f"{text}\n{block}" if text else block


@pytest.mark.parametrize("template", [NATIVE, TEXTUAL, TEMPLATE], ids=["object", "text", "none"])
@pytest.mark.parametrize("path", SESSIONS, ids=lambda path: path.stem[:8] if path else "none")
def test_every_turn_goes_on_from_the_one_before(path, template):
    if path is None:
        pytest.skip("no recorded sessions here")
    asked, turns = turns_of(path)
    rig = rig_of(template=template, max_context=10**6)
    engine = rig.engine
    messages = [{"role": "user", "content": asked}]
    computed: list[int] = []
    assert turns
    for text, command, result in turns:
        reply = engine.backend.encode(written(text, command)).ids
        engine.replies = lambda call, reply=reply: reply
        body = {"model": MODEL, "messages": messages, "tools": [BASH]}
        answer = rig.request("POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        prompt = engine.calls[-1].tokens
        assert prompt[: len(computed)] == computed, "what was computed is not found again"
        computed = prompt + reply
        message = answer.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"command": command}
        assert (message["content"] or "") == text
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
