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
from pydantic import create_model

from e2e.server.harness import API_KEY, MODEL, TIMEOUT_S

QUESTIONS = ["Do I need an umbrella in Rome?", "And in Oslo?"]
MAX_TOKENS = 24

City = Literal["Rome", "Oslo"]
ADVICE = create_model("Advice", umbrella=(bool, ...))


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
@pytest.mark.parametrize(
    ("endpoint", "shape"),
    [
        pytest.param("OpenAIChatCompletionsModel", str, marks=pytest.mark.long),
        pytest.param("OpenAIChatCompletionsModel", ADVICE, marks=pytest.mark.long),
        ("OpenAIResponsesModel", ADVICE),
    ],
)
def test_openai_agents(server, endpoint, shape, stream):
    """A question is a turn with a call, one without tools, and an answer. Over responses that has a
    schema: this framework takes what is cut off for an error, as OpenAI means it, and this model
    seldom comes to an end by itself, in text as in calls."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    weather = Weather()
    said, told = [], []

    def is_left(context, agent):
        return len(weather.cities) <= len(told)

    async def work(client):
        agent = agents.Agent(
            name="weather",
            tools=[agents.function_tool(weather.get_weather, is_enabled=is_left)],
            model=getattr(agents, endpoint)(model=MODEL, openai_client=client),
            # Goes back to auto behind the first call of a run.
            model_settings=agents.ModelSettings(
                tool_choice="required",
                parallel_tool_calls=False,
                temperature=0,
                max_tokens=2 * MAX_TOKENS,
            ),
            output_type=shape,
        )
        nonlocal said
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            if stream:
                running = agents.Runner.run_streamed(agent, said, max_turns=3)
                async for _ in running.stream_events():
                    pass
            else:
                running = await agents.Runner.run(agent, said, max_turns=3)
            said = running.to_input_list()
            told.append(running.final_output)

    run(server, work)
    assert len(told) == len(QUESTIONS)
    assert all(isinstance(each, shape) for each in told)
    assert len(weather.cities) == len(QUESTIONS), "each question begins with a call"
    assert set(weather.cities) <= {"Rome", "Oslo"}
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
