"""/v1/responses: the same chats in OpenAI's newer form, read by its own client."""

import contextlib
import json

import httpx
import pytest
from openai import OpenAI

from quire.server.responses.items import messages_of
from quire.server.responses.remembered import ResponseMemory
from quire.text.messages import Message
from unit.server.scripted import ADMIN_KEY, MODEL, Rig, error_of
from unit.server.test_tools import NATIVE, prompt_of, rig_of

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def respond(rig: Rig, given="hi", **fields):
    body = {"model": MODEL, "input": given} | fields
    return rig.request("POST", "/v1/responses", json=body)


@contextlib.contextmanager
def client_of(rig: Rig):
    def handle(request: httpx.Request) -> httpx.Response:
        answer = rig.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    with OpenAI(base_url="http://localhost/v1", api_key=ADMIN_KEY, http_client=http) as client:
        yield client


def test_a_response_is_the_chat_in_another_form():
    rig = rig_of("hello")
    body = respond(rig, "hi", instructions="Be brief.").json()
    (item,) = body["output"]
    assert (body["status"], item["type"], item["content"][0]["text"]) == (
        "completed", "message", "hello",
    )  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    rig.chat(messages=messages)
    assert rig.engine.calls[0].tokens == rig.engine.calls[1].tokens
    assert body["usage"]["input_tokens"] == len(rig.engine.calls[0].tokens)


def test_a_conversation_goes_on_by_its_id():
    rig = rig_of(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    first = respond(rig, "hi", tools=[WEATHER]).json()
    reasoning, text, call = first["output"]
    assert [each["type"] for each in first["output"]] == ["reasoning", "message", "function_call"]
    computed = rig.engine.calls[0].tokens
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = respond(rig, [result], tools=[WEATHER], previous_response_id=first["id"]).json()
    by_id = rig.engine.calls[1].tokens
    assert by_id[: len(computed)] == computed
    assert second["previous_response_id"] == first["id"]
    # … which is the same as sending all of it.
    asked = {"role": "user", "content": "hi"}
    respond(rig, [asked, reasoning, text, call, result], tools=[WEATHER])
    assert rig.engine.calls[2].tokens == by_id
    generated = rig.engine.backend.encode(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}").ids
    assert by_id[: len(computed) + len(generated)] == computed + generated


@pytest.mark.parametrize("fields", [{"store": False}, {}])
def test_what_is_not_kept_cannot_be_gone_on_from(fields):
    rig = rig_of()
    name = respond(rig, **fields).json()["id"] if fields else "resp_unheard_of"
    error = error_of(respond(rig, previous_response_id=name))
    assert (error["param"], error["code"]) == (
        "previous_response_id", "previous_response_not_found",
    )  # fmt: skip


def test_memory_has_bounds():
    memory = ResponseMemory(max_responses=2, max_chars=100)
    for name in "abc":
        memory.keep(name, [Message(role="user", content="x" * 10)])
    assert [memory.find(name) is not None for name in "abc"] == [False, True, True]
    memory.find("b")
    memory.keep("d", [Message(role="user", content="x" * 85)])
    assert [memory.find(name) is not None for name in "bcd"] == [True, False, True]
    memory.keep("e", [Message(role="user", content="x" * 101)])
    assert not any(memory.find(name) for name in "bcde")


def test_an_answer_that_is_cut_is_incomplete():
    body = respond(rig_of("hello there"), max_output_tokens=2).json()
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


def test_events_are_numbered_and_end_with_the_response():
    rig = rig_of(f"I look.\n{CALL}")
    events = respond(rig, tools=[WEATHER], stream=True).text.split("\n\n")[:-1]
    found = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    names = [event.partition("\n")[0].removeprefix("event: ") for event in events]
    assert names == [each["type"] for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert names[:2] == ["response.created", "response.in_progress"]
    last = found[-1]
    assert last["type"] == "response.completed"
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == "I look."


def test_the_official_client_reads_it():
    rig = rig_of(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    with client_of(rig) as client:
        answer = client.responses.create(model=MODEL, input="hi", tools=[WEATHER])
        assert answer.output_text == "I look."
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')
        with client.responses.stream(
            model=MODEL, input="hi", tools=[WEATHER], previous_response_id=answer.id
        ) as stream:
            final = stream.get_final_response()
    assert final.output_text == "I look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "x", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(fields, param):
    response = respond(rig_of(), **fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


def test_items_of_one_turn_are_one_message():
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    found = messages_of(
        [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            call,
            call,
            {"type": "function_call_output", "call_id": "1", "output": "x"},
            call,
            {"role": "assistant", "content": "later"},
        ]
    )
    assert [(m.role, m.content, len(m.tool_calls or [])) for m in found] == [
        ("assistant", "t", 2), ("tool", "x", 0), ("assistant", None, 1), ("assistant", "later", 0),
    ]  # fmt: skip
    assert found[0].reasoning_content == "r"


def test_tools_are_told_to_the_model():
    rig = rig_of(template=NATIVE)
    respond(rig, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    assert prompt_of(rig).endswith('{"name": "get_weather", "arguments":')
