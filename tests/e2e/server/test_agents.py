"""An agent's loop with the official client against the real server and the real model.

The model is too small to choose tools well, so it is made to call. What is held to: every answer is
a call or text, never an error; and each turn finds what the turns before it computed.
"""

import json

import pytest

from e2e.server.harness import MODEL

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
"""Without a bound a small model writes digits until its tokens are used up."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": DIGIT, "b": DIGIT},
            "required": ["a", "b"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}
NUM_TURNS = 3
PAGE = 16


def answered(client, messages, *, stream):
    """A message as a client has it, and its usage."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": 48, "messages": messages}
    options |= {"tools": [ADD], "tool_choice": NAMED}
    if not stream:
        answer = client.chat.completions.create(**options)
        return answer.choices[0].message, answer.usage
    options["stream_options"] = {"include_usage": True}
    with client.chat.completions.stream(**options) as found:
        answer = found.get_final_completion()
    return answer.choices[0].message, answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_turns(client, stream):
    salted = f"Add 2 and 3, please. ({'streamed' if stream else 'whole'})"
    messages = [{"role": "user", "content": salted}]
    computed, num_calls = 0, 0
    for _ in range(NUM_TURNS):
        message, usage = answered(client, messages, stream=stream)
        cached = usage.prompt_tokens_details.cached_tokens
        if num_calls:  # the turn before was sent back as it was made
            assert cached >= 0.95 * (computed - computed % PAGE) - PAGE
        computed = usage.prompt_tokens
        messages.append(
            message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        )
        for call in message.tool_calls or []:
            num_calls += 1
            assert call.function.name == "add"
            assert isinstance(json.loads(call.function.arguments), dict)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Again."})
    assert num_calls, "the model called nothing, however it was made to"
