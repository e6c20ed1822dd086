"""Agent frameworks against the real server and the real model: conversations of several turns with
tools, streamed and not. Skipped where they are not installed.

The model is too small to know when a tool is of use, so that a call is asked for where the
framework can; what it calls with is held to the schema. What scripted models do with them is in
test_frameworks.py, the client without a framework in test_agents.py.
"""

import asyncio
from typing import Literal

import openai
import pytest

from e2e.server.harness import API_KEY, MODEL, TIMEOUT_S

QUESTIONS = ["Do I need an umbrella in Rome?", "And in Oslo?"]
MAX_TOKENS = 24

City = Literal["Rome", "Oslo"]


class Weather:
    """A tool, and what it was called with."""

    def __init__(self) -> None:
        self.cities: list[str] = []

    def get_weather(self, city: City) -> str:
        """The weather of a city"""
        self.cities.append(city)
        return f"sunny in {city} <|im_end|>"


def run(server, work):
    """`work` with a client, in a loop of its own."""

    async def connected():
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key=API_KEY, max_retries=0, timeout=TIMEOUT_S
        ) as client:
            return await work(client)

    return asyncio.run(connected())


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.long), True])
def test_openai_agents(server, stream):
    """By chat completions: over responses this framework takes an answer that is cut off for an
    error, and this model seldom comes to an end."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    weather = Weather()

    async def work(client):
        agent = agents.Agent(
            name="weather",
            tools=[agents.function_tool(weather.get_weather)],
            model=agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
            # Goes back to auto behind the first call of a run.
            model_settings=agents.ModelSettings(
                tool_choice="required", temperature=0, max_tokens=MAX_TOKENS
            ),
        )
        said, told = [], []
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            if stream:
                running = agents.Runner.run_streamed(agent, said, max_turns=8)
                async for _ in running.stream_events():
                    pass
            else:
                running = await agents.Runner.run(agent, said, max_turns=8)
            said = running.to_input_list()
            told.append(running.final_output)
        return said, told

    said, told = run(server, work)
    assert len(weather.cities) >= len(QUESTIONS), "each question begins with a call"
    assert set(weather.cities) <= {"Rome", "Oslo"}
    assert all(isinstance(each, str) for each in told)
    results = [item for item in said if item.get("type") == "function_call_output"]
    assert len(results) == len(weather.cities)


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize(
    "endpoint",
    ["OpenAIChatModel", pytest.param("OpenAIResponsesModel", marks=pytest.mark.long)],
)
def test_pydantic_ai(server, endpoint, stream):
    """A structured answer is a call of a function that must be called. The tool is offered once a
    question, so that a model which likes it too much comes to its end."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic import create_model
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    shape = create_model("Shape", city=(City, ...), umbrella=(bool, ...))
    weather = Weather()

    async def work(client):
        provider = OpenAIProvider(openai_client=client)
        model = getattr(models, endpoint)(MODEL, provider=provider)
        settings = {"temperature": 0, "max_tokens": 2 * MAX_TOKENS}
        agent = pydantic_ai.Agent(model, output_type=shape, model_settings=settings)

        async def once(context, definition):
            return definition if len(weather.cities) < len(told) + 1 else None

        agent.tool_plain(weather.get_weather, prepare=once)
        said, told = [], []
        for question in QUESTIONS:
            if stream:
                async with agent.run_stream(question, message_history=said) as running:
                    told.append(await running.get_output())
                said = running.all_messages()
            else:
                answer = await agent.run(question, message_history=said)
                told.append(answer.output)
                said = answer.all_messages()
        return told

    told = run(server, work)
    assert len(told) == len(QUESTIONS)
    assert all(each.city in ("Rome", "Oslo") and each.umbrella in (True, False) for each in told)
    assert set(weather.cities) <= {"Rome", "Oslo"}
