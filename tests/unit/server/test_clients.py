"""What clients send beside the prompt, and what they ask for beside the text."""

import logging

import pytest
from openai import OpenAI

from quire.server.config import ServerConfig
from quire.server.incoming import MAX_NAMES
from quire.text.generation_config import SamplingDefaults
from unit.server.scripted import ADMIN_KEY, MODEL, Rig, ScriptedEngine, error_of
from unit.server.test_answers import chunks

# ---- fields that nobody knows --------------------------------------------------------------------


def test_fields_that_nobody_knows_are_ignored_with_one_warning_each(rig, caplog):
    messages = [{"role": "user", "content": "hi", "inner": 1}]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert rig.chat(messages=messages, outer={"a": 1}).status_code == 200
    named = [record.getMessage() for record in caplog.records if "not known" in record.getMessage()]
    assert named == [
        "field 'outer' of a request is not known, and ignored",
        "field 'inner' of a request is not known, and ignored",
    ]


def test_the_log_names_only_so_many(rig, caplog):
    fields = {f"field_{i}" + "x" * 10_000: 1 for i in range(MAX_NAMES + 50)}
    with caplog.at_level(logging.WARNING):
        assert rig.chat(**fields).status_code == 200
    assert len(caplog.records) == MAX_NAMES + 1
    assert all(len(record.getMessage()) < 200 for record in caplog.records)


def test_known_fields_are_checked_all_the_same(rig):
    assert error_of(rig.chat(temperature="hot", outer=1))["param"] == "temperature"


def test_fields_of_openais_that_change_nothing(rig):
    fields = {"store": True, "service_tier": "flex", "metadata": {"a": "b"}, "prediction": {}}
    assert rig.chat(**fields).status_code == 200


# ---- names, defaults, stops ----------------------------------------------------------------------


def test_a_model_may_have_several_names():
    rig = Rig(config=ServerConfig(served_names=("small", "default")))
    listed = rig.request("GET", "/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["small", "default"]
    assert rig.chat(model="default").json()["model"] == "default"
    assert error_of(rig.chat(model=MODEL))["code"] == "model_not_found"
    assert rig.request("GET", "/v1/models/small").status_code == 200


def test_what_a_request_does_not_say_is_as_the_models_makers_say(engine):
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)
    rig = Rig(engine, defaults=defaults)
    rig.chat()
    rig.chat(temperature=0, top_p=1, top_k=0, repetition_penalty=1)
    said = [
        (p.temperature, p.top_p, p.top_k, p.repetition_penalty)
        for p in (call.params for call in engine.calls)
    ]
    assert said == [(0.6, 0.9, 20, 1.05), (0.0, 1.0, 0, 1.0)]


def test_a_chat_without_a_limit_may_fill_the_context(rig, engine):
    rig.chat()
    (call,) = engine.calls
    assert call.params.max_tokens == 200 - len(call.tokens)


def test_a_stop_string_that_is_a_special_token_stops(rig, engine):
    start = engine.backend.token_to_id("<|im_start|>")
    engine.replies = lambda call: [*engine.backend.encode("hell").ids, start, 5, 6]
    choice = rig.chat(stop=["<|im_start|>"], ignore_eos=True).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hell", "stop")
    assert start in engine.calls[0].params.stop_ids


# ---- tokens --------------------------------------------------------------------------------------


def test_token_ids_beside_the_text(rig, engine):
    body = rig.chat(return_token_ids=True).json()
    assert body["prompt_token_ids"] == engine.calls[0].tokens
    assert body["choices"][0]["token_ids"] == [
        *engine.backend.encode("hello there").ids,
        engine.eos,
    ]
    body = rig.complete("hi", return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == engine.calls[1].tokens
    assert "token_ids" not in rig.chat().json()["choices"][0]


@pytest.mark.parametrize("ask", ["chat", "complete"])
def test_token_ids_in_a_stream(rig, engine, ask):
    found = chunks(getattr(rig, ask)(return_token_ids=True, stream=True))
    shared, own = found[0], found[0]["choices"][0]
    assert (shared if ask == "chat" else own)["prompt_token_ids"] == engine.calls[0].tokens
    ids = [i for chunk in found for each in chunk["choices"] for i in each.get("token_ids", [])]
    assert ids == [*engine.backend.encode("hello there").ids, engine.eos]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("ask", ["chat", "complete"])
def test_an_answer_that_was_broken_off_goes_on_after_its_tokens(rig, engine, ask, count):
    """What it begins with is told again, and not generated again; nothing is counted twice."""
    whole = [*engine.backend.encode("hello there").ids, engine.eos]
    fields = {"stream": True, "return_answer_ids": True, "stream_options": {"include_usage": True}}
    first = chunks(getattr(rig, ask)(**fields))
    again = chunks(getattr(rig, ask)(**fields, continue_token_ids=whole[:count]))

    def told(found, name):
        return [i for c in found for each in c["choices"] for i in each.get(name, [])]

    def text(found):
        parts = [each.get("delta", each) for c in found for each in c["choices"]]
        return "".join(part.get("content") or part.get("text") or "" for part in parts)

    assert told(again, "token_ids") == told(first, "token_ids") == whole
    assert text(again) == text(first) == "hello there"
    assert [c["finish_reason"] for c in again[-2]["choices"]] == ["stop"]
    assert again[-1]["usage"]["completion_tokens"] == len(whole)
    assert "prompt_token_ids" not in str(again)
    assert [call.num_said for call in engine.calls] == ([0, count] if count < len(whole) else [0])


def test_what_cannot_be_continued_is_refused(rig):
    for fields, reason in (
        ({"n": 2}, "one choice"),
        ({"logprobs": True}, "without logprobs"),
        ({"continue_token_ids": [10**9]}, "token id"),
        ({"continue_token_ids": ["x"]}, "continue_token_ids"),
    ):
        answer = rig.chat(**({"continue_token_ids": [1]} | fields))
        assert answer.status_code == 400
        assert reason in answer.text
    answer = rig.complete(["a", "b"], continue_token_ids=[1])
    assert (answer.status_code, "only one answer" in answer.text) == (400, True)


def test_tokens_of_a_text_and_back(rig, engine):
    body = rig.request("POST", "/tokenize", json={"model": MODEL, "prompt": "hello <|im_end|>"})
    tokens = body.json()["tokens"]
    assert tokens == engine.backend.encode("hello <|im_end|>").ids
    assert body.json() | {"tokens": 0} == {
        "count": len(tokens), "max_model_len": 200, "tokens": 0, "token_strs": None,
    }  # fmt: skip
    back = rig.request("POST", "/detokenize", json={"tokens": tokens}).json()
    assert back == {"prompt": "hello <|im_end|>"}


def test_tokens_of_a_chat_are_its_prompt(rig, engine):
    messages = [{"role": "user", "content": "hi"}]
    rig.chat("hi")
    body = {"messages": messages, "return_token_strs": True}
    found = rig.request("POST", "/tokenize", json=body).json()
    assert found["tokens"] == engine.calls[0].tokens
    assert found["token_strs"][0] == "<|im_start|>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_named(rig, path, body, param):
    assert error_of(rig.request("POST", path, json=body))["param"] == param


def test_tokens_need_the_key():
    rig = Rig(config=ServerConfig(api_key="key"))
    assert rig.request("POST", "/tokenize", json={"prompt": "x"}).status_code == 401
    assert rig.request("POST", "/detokenize", json={"tokens": [1]}).status_code == 401


# ---- the official client -------------------------------------------------------------------------


def test_the_official_client_reads_calls(monkeypatch):
    """Its own types, and what it adds up of a stream, through the application itself."""
    import httpx

    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    rig = Rig(ScriptedEngine(call, max_context=4000))

    def handle(request: httpx.Request) -> httpx.Response:
        answer = rig.request(
            request.method, request.url.path, content=request.content, headers=request.headers
        )
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    transport = httpx.MockTransport(handle)
    with OpenAI(
        base_url="http://localhost/v1",
        api_key=ADMIN_KEY,
        http_client=httpx.Client(transport=transport),
    ) as client:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        (found,) = answer.choices[0].message.tool_calls
        assert (found.function.name, found.function.arguments) == ("f", '{"x": 1}')
        result = {"role": "tool", "tool_call_id": found.id, "content": "done"}
        turns = [*messages, answer.choices[0].message, result]
        with client.chat.completions.stream(model=MODEL, messages=turns, tools=tools) as stream:
            final = stream.get_final_completion()
    (found,) = final.choices[0].message.tool_calls
    assert (found.function.name, found.function.arguments) == ("f", '{"x": 1}')
    assert final.choices[0].finish_reason == "tool_calls"
