"""Agent frameworks as clients, over real sockets: loops of several turns, streamed and not, by both
endpoints. Skipped where they are not installed (openai-agents, pydantic-ai-slim[openai]).

The engine is scripted, because the model at hand is too small to use tools on its own; the server
is the real one.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from unit.server.scripted import ADMIN_KEY, MODEL, Rig
from unit.server.test_tools import rig_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
RESULT = (
    '<tool_call>\n{"name": "final_result", "arguments": {"city": "Rome", "umbrella": false}}\n'
    "</tool_call>"
)
FORCED = '<tool_call>\n{"name":'
QUESTION = "Do I need an umbrella in Rome?"
ANSWER = "No, it is sunny."
NUM_CALLS = 2


def scripted() -> Rig:
    """Calls the function twice, then answers: with a call if only calls are wanted."""
    rig = rig_of(max_context=100_000)
    backend = rig.engine.backend

    def replies(call):
        prompt = backend.decode(call.tokens, skip_special_tokens=False)
        is_done = prompt.count("<|im_start|>tool\n") >= NUM_CALLS
        if prompt.endswith(FORCED):
            return backend.encode((RESULT if is_done else CALL).removeprefix(FORCED)).ids
        return backend.encode(ANSWER if is_done else CALL).ids

    rig.engine.replies = replies
    return rig


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(scripted().app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


def run(url, work):
    """`work` with a client, in a loop of its own."""

    async def connected():
        async with openai.AsyncOpenAI(base_url=url, api_key=ADMIN_KEY, max_retries=0) as client:
            return await work(client)

    return asyncio.run(connected())


@pytest.mark.parametrize("endpoint", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents(url, endpoint, stream):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work(client):
        model = getattr(agents, endpoint)(model=MODEL, openai_client=client)
        agent = agents.Agent(name="weather", tools=[agents.function_tool(get_weather)], model=model)
        if not stream:
            return await agents.Runner.run(agent, QUESTION)
        running = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return running

    found = run(url, work)
    assert found.final_output == ANSWER
    assert len(found.raw_responses) == NUM_CALLS + 1


@pytest.mark.parametrize("endpoint", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_structured", [False, True])
def test_pydantic_ai(url, endpoint, stream, is_structured):
    """A structured answer is a call of a function that must be called."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import create_model
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    shape = create_model("Shape", city=(str, ...), umbrella=(bool, ...))

    async def work(client):
        provider = OpenAIProvider(openai_client=client)
        model = getattr(models, endpoint)(MODEL, provider=provider)
        agent = pydantic_ai.Agent(model, output_type=shape if is_structured else str)
        agent.tool_plain(get_weather)
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as running:
            return await running.get_output()

    expected = shape(city="Rome", umbrella=False).model_dump() if is_structured else ANSWER
    found = run(url, work)
    assert (found.model_dump() if is_structured else found) == expected


def get_weather(city: str) -> str:
    """The weather of a city"""
    return f"sunny in {city} <|im_end|>"
