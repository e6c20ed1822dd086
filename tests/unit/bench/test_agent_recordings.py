"""Recordings of a coding agent as text become requests, as agents send them."""

import json

import agent_recordings


def test_recorded_text_with_commands_becomes_calls_and_results():
    rows = [
        {"timestamp": 2, "input": "fix it<out>a.py</out>", "output": "```bash\ncat a.py\n```"},
        {"timestamp": 1, "input": "fix it", "output": "I look.\n```bash\nls\n```"},
        {"timestamp": 3, "input": "fix it<out>a.py</out><out>x</out>", "output": "done"},
    ]
    found = agent_recordings.requests(rows)
    last = found[-1]["messages"]
    assert [message["role"] for message in last] == [
        "user", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip
    assert last[1]["content"] == "I look."
    assert json.loads(last[1]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls"}
    assert last[2] == {"role": "tool", "content": "<out>a.py</out>", "tool_call_id": "call00000"}
    assert last[: len(found[1]["messages"])] == found[1]["messages"]


def test_recorded_text_without_commands_is_said_by_the_user():
    rows = [{"timestamp": at, "input": "x" * at, "output": "well"} for at in (1, 2)]
    found = agent_recordings.requests(rows)
    assert [request["messages"][0]["content"] for request in found] == ["x", "xx"]
