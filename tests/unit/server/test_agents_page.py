"""docs/agents.md: its examples are run, as they stand, against a server without sockets."""

import re
import shlex
from pathlib import Path

import httpx
import openai
import pytest

from unit.server.scripted import Rig, ScriptedEngine

PAGE = (Path(__file__).parents[3] / "docs/agents.md").read_text()
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def answering():
    """Calls the function until it has a result."""
    engine = ScriptedEngine(max_context=8000)

    def replies(call):
        prompt = engine.backend.decode(call.tokens, skip_special_tokens=False)
        has_result = "<tool_response>\nsunny in Rome" in prompt
        is_offered = "get_weather" in prompt
        text = CALL if is_offered and not has_result else "No, it is sunny."
        return engine.backend.encode(text).ids

    engine.replies = replies
    return Rig(engine)


def test_the_examples_in_python(monkeypatch, capsys):
    rig = answering()

    def handle(request: httpx.Request) -> httpx.Response:
        answer = rig.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    real = openai.OpenAI
    opened = []

    def connected(**options):
        client = real(**options, http_client=httpx.Client(transport=httpx.MockTransport(handle)))
        opened.append(client)
        return client

    monkeypatch.setattr(openai, "OpenAI", connected)
    found = blocks("python")
    assert len(found) == 7
    names: dict[str, object] = {}
    try:
        for block in found:
            exec(compile(block, "docs/agents.md", "exec"), names)
    finally:
        for client in opened:
            client.close()
    first, streamed, held, reasoning, second = capsys.readouterr().out.splitlines()
    assert first == "No, it is sunny."
    assert streamed.split(" ", 1)[0] == "0"
    assert streamed.endswith('get_weather {"city": "Rome"}')
    assert held == "No, it is sunny.", "the script follows no schema"
    assert reasoning == "None"
    assert second == "No, it is sunny."


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines()])
def test_the_examples_for_a_shell(line):
    curl, url, _, header, _, body = shlex.split(line)
    assert curl == "curl"
    path = url.removeprefix("http://127.0.0.1:8000")
    name, value = header.split(": ")
    answer = answering().request("POST", path, content=body.encode(), headers={name: value})
    assert answer.status_code == 200, answer.text
