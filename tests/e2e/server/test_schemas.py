"""Answers that follow a schema, by the real server and the real model, at temperature 1."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from e2e.server.harness import MODEL, running
from evidence.schemas.cases import follows, random_schema

pytest.importorskip("llguidance")

ASKED = [{"role": "user", "content": "Make something up, as JSON."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY, "strict": True},
}


def answered(client: openai.OpenAI, schema: dict, seed: int, max_tokens: int = 700):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        temperature=1,
        seed=seed,
        max_tokens=max_tokens,
        response_format=form,
    )
    return answer.choices[0]


def check(client: openai.OpenAI, count: int, seed: int, threads: int, depth: int = 3) -> None:
    """As many random schemas: every answer ends by itself and follows its own."""
    rng = random.Random(seed)
    schemas = [random_schema(rng, depth) for _ in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        choices = pool.map(
            lambda case: answered(client, case[1], case[0]), list(enumerate(schemas))
        )
        for i, (schema, choice) in enumerate(zip(schemas, choices, strict=True)):
            where = f"seed {seed}, schema {i}: {json.dumps(schema)}: {choice.message.content!r}"
            assert choice.finish_reason == "stop", where
            assert follows(json.loads(choice.message.content), schema), where


def test_random_schemas(client):
    check(client, count=6, seed=4, threads=4, depth=1)


@pytest.mark.long
def test_five_hundred_random_schemas():
    engine = {"max_running": 32, "max_waiting": 64, "device_bytes": 1 << 30}
    with (
        running(engine, {"api_key": "none"}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=600) as client,
    ):
        check(client, count=500, seed=20_261, threads=32)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_be_made_follows_its_schema(client, stream):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "The weather in Rome?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        seed=3,
        max_tokens=80,
        stream=stream,
    )
    if stream:
        deltas = [choice.delta for chunk in answer for choice in chunk.choices]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "days"}
    assert arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_compiled(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ASKED, response_format=form, stream=stream
        )
    assert caught.value.code == "invalid_schema"
