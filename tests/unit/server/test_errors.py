"""Bad requests and bad engines: every failure is an answer in OpenAI's form."""

import asyncio
import json

import pytest

from quire.engine.config import EngineConfig
from quire.engine.messages import Finish
from quire.errors import EngineError
from quire.server.config import ServerConfig
from unit.server.scripted import MAX_CONTEXT, MODEL, Rig, ScriptedEngine, TinyTokenizer, error_of

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refused(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


# ---- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b"[" * 10_000,
        b'{"model": "\\ud800"}',
        b'{"model": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_a_json_object(rig, body):
    refused(rig.request("POST", CHAT, content=body, headers=JSON), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_is_not_said_to_be_json(rig, kind):
    response = rig.request("POST", CHAT, content=b"{}", headers={"content-type": kind})
    refused(response, 415)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", []),
        ("seed", 1 << 63),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", [""]),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [99999]),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 17),
        ("stream", "yes"),
        ("user", 5),
        ("cache_salt", ""),
        ("cache_salt", "a b"),
        ("cache_salt", "a\nb"),
        ("cache_salt", "ab\n"),
        ("cache_salt", "é"),
        ("cache_salt", "x" * 129),
        ("cache_salt", "\u0000"),
        ("cache_salt", 5),
        ("priority", 1001),
        ("priority", 0.5),
        ("timeout", 0),
        ("timeout", -1),
        ("timeout", 601),
        ("model", 5),
        ("stream_options", {"include_usage": True}),
        ("best_of", 2),
        ("suffix", "x"),
        ("prompt", 5),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", [1.0]),
        ("prompt", [-1]),
        ("prompt", [99999]),
        ("prompt", [[1], [99999]]),
        ("prompt", {"text": "x"}),
        ("prompt", None),
        ("prompt", ["x"] * 129),
        ("logprobs", True),
        ("logprobs", 21),
        ("echo", "yes"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(rig, engine, field, value):
    response = rig.complete(**{field: value}) if field != "prompt" else rig.complete(value)
    assert field in refused(response, 400, field)
    assert not engine.calls


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("function_call", "auto"),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("verbosity", "high"),
        ("web_search_options", {}),
        ("moderation", {}),
    ],
)
def test_a_field_that_is_not_supported_is_named(rig, field, value):
    message = refused(rig.chat(**{field: value}), 400, field, "unsupported_field")
    assert field in message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ([5], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content"),
        ([{"role": "tool"}], "messages.0.content"),
        ([{"role": "x", "content": "x"}], "messages.0.role"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages.0.tool_calls.0"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages.0.tool_calls"),
        ([{"role": "assistant"}], "messages.0.content"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
    ],
)
def test_wrong_messages_are_named_by_their_place(rig, messages, param):
    refused(rig.chat(messages=messages), 400, param)


def test_fields_that_contradict_each_other(rig):
    refused(rig.chat(top_logprobs=2), 400, "top_logprobs")
    refused(rig.chat(max_tokens=1, max_completion_tokens=1), 400, "max_tokens")
    refused(rig.complete(echo=True, logprobs=1, stream=True), 400, "echo")
    refused(rig.complete(prompt_logprobs=1, stream=True), 400, "prompt_logprobs")
    refused(rig.chat(prompt_logprobs=21), 400, "prompt_logprobs")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_are_none(rig, number):
    body = b'{"model":"tiny","prompt":"x","temperature":' + number + b"}"
    refused(rig.request("POST", "/v1/completions", content=body, headers=JSON), 400, "temperature")
    body = b'{"model":"tiny","prompt":"x","logit_bias":{"1":' + number + b"}}"
    refused(rig.request("POST", "/v1/completions", content=body, headers=JSON), 400, "logit_bias")


def test_a_field_that_is_missing(rig):
    refused(rig.request("POST", CHAT, json={"model": MODEL}), 400, "messages", "missing_field")


def test_with_strict_a_field_that_nobody_knows_is_named(engine):
    rig = Rig(engine, ServerConfig(strict=True))
    refused(rig.complete(unheard_of=1), 400, "unheard_of", "unknown_field")
    messages = [{"role": "user", "content": "x", "z": 1}]
    refused(rig.chat(messages=messages), 400, "messages.0.z", "unknown_field")


def test_long_names_are_not_sent_back(engine):
    rig = Rig(engine, ServerConfig(strict=True))
    response = rig.complete(**{"x" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.content) < 1000


def test_an_unknown_model(rig):
    message = refused(rig.chat(model="gpt-9"), 404, "model", "model_not_found")
    assert MODEL in message
    refused(rig.request("GET", "/v1/models/gpt-9"), 404, "model", "model_not_found")


# ---- prompts -------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(rig):
    for prompt in ("x" * MAX_CONTEXT, [1] * MAX_CONTEXT, "x" * 100_000, [1] * 10_000):
        message = refused(rig.complete(prompt), 400, "prompt", "context_length_exceeded")
        assert str(MAX_CONTEXT) in message
    refused(rig.chat("x" * MAX_CONTEXT), 400, "messages", "context_length_exceeded")


def test_more_tokens_than_fit_behind_the_prompt(rig):
    message = refused(rig.complete([1] * 10, max_tokens=MAX_CONTEXT - 9), 400, "max_tokens")
    assert f"{MAX_CONTEXT + 1}" in message
    assert "10 of the prompt" in message


def test_a_model_without_a_template():
    rig = Rig(tokenizer=TinyTokenizer(template=None))
    refused(rig.chat(), 400, None, "no_chat_template")
    assert rig.complete().status_code == 200


def test_a_template_that_refuses(rig):
    response = rig.chat(messages=[{"role": "assistant", "content": "x"}])
    message = refused(response, 400, "messages", "chat_template_error")
    assert "begin with user" in message


def test_a_broken_template():
    rig = Rig(tokenizer=TinyTokenizer(template="{{ messages.nothing.more }}"))
    refused(rig.chat(), 400, "messages", "chat_template_error")


def test_a_template_that_makes_nothing():
    rig = Rig(tokenizer=TinyTokenizer(template="{# nothing #}"))
    refused(rig.chat(), 400, "messages")


# ---- paths and keys ------------------------------------------------------------------------------


def test_paths_and_methods_that_there_are_not(rig):
    refused(rig.request("GET", "/"), 404)
    refused(rig.request("GET", "/docs"), 404)
    refused(rig.request("GET", "/v1/models/"), 404, "model")
    refused(rig.request("POST", CHAT + "/", json={}), 404)
    response = rig.request("GET", CHAT)
    refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_with_an_api_key_v1_needs_it():
    rig = Rig(config=ServerConfig(api_key="key"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "key"}):
        for method, path in (("POST", CHAT), ("GET", "/v1/models")):
            response = rig.request(method, path, headers=headers)
            refused(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    good = {"Authorization": "Bearer key"}
    assert rig.request("GET", "/v1/models", headers=good).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert rig.request("GET", path).status_code == 200


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        (Finish.REJECTED, (429, "rejected")),
        (Finish.TIMEOUT, (504, "timeout")),
        (Finish.ERROR, (500, "engine_error")),
    ],
)
def test_an_engine_that_refuses_before_the_first_token(engine, rig, stream, finish, expected):
    engine.replies = lambda call: []
    engine.end = (finish, "too bad")
    response = rig.chat(stream=stream)
    status, code = expected
    assert "too bad" in refused(response, status, None, code)
    assert ("retry-after" in response.headers) == (status == 429)


@pytest.mark.parametrize(
    ("end", "code"), [(Finish.TIMEOUT, "timeout"), (Finish.ERROR, "engine_error")]
)
def test_an_engine_that_fails_within_a_stream(engine, rig, end, code):
    engine.end = (end, "too bad")
    response = rig.chat(stream=True)
    assert response.status_code == 200
    *events, last, rest = response.text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["message"], error["code"]) == ("too bad", code)
    assert error.keys() == {"message", "type", "param", "code"}
    assert rest == ""
    assert len(events) > 2
    assert "[DONE]" not in response.text


def test_a_failed_choice_fails_the_request_and_aborts_the_others(engine, rig):
    def replies(call):
        is_second = len(engine.calls) == 2
        engine.end = (Finish.ERROR, "too bad") if is_second else None
        return [1] * (1 if is_second else 100)

    engine.replies = replies
    assert "too bad" in refused(rig.complete(n=3), 500)
    assert engine.num_aborted == 2


def test_an_engine_that_is_gone(engine, rig):
    engine.failure = "the engine process was killed by signal 9"
    for response in (rig.chat(), rig.chat(stream=True), rig.request("GET", "/health")):
        assert engine.failure in refused(response, 503, None, "engine_unavailable")
    assert rig.request("GET", "/ready").status_code == 503


def test_an_engine_that_takes_no_messages(engine, rig, monkeypatch):
    def generate(*_, **__):
        raise EngineError("the engine does not take messages: it is too far behind")

    monkeypatch.setattr(engine, "generate", generate)
    assert "too far behind" in refused(rig.chat(), 503)


def test_an_engine_that_never_answers(engine, rig, monkeypatch):
    monkeypatch.setattr("quire.server.generation.ENGINE_GRACE_S", 0.05)
    engine.hold_after = 0
    refused(rig.chat(timeout=0.01), 504, None, "timeout")
    assert engine.num_aborted == 1


def test_a_full_queue():
    config = EngineConfig(model="", name=MODEL, device_bytes=1, max_running=2, max_waiting=1)
    engine = ScriptedEngine(config=config)
    rig = Rig(engine)
    engine.hold_after = 1
    body = {"model": MODEL, "prompt": "x"}

    async def run():
        async with rig.client() as client:
            held = asyncio.create_task(client.post("/v1/completions", json=body | {"n": 2}))
            while engine.num_requests < 2:
                await asyncio.sleep(0)
            full = await client.post("/v1/completions", json=body | {"n": 2})
            message = refused(full, 429, None, "queue_full")
            assert "max_running" in message
            assert "max_waiting" in message
            assert full.headers["retry-after"] == "1"
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
            engine.hold_after = None
            free = await client.post("/v1/completions", json=body | {"n": 3})
            assert free.status_code == 200

    asyncio.run(run())
    refused(rig.complete(n=4), 400, "n")  # would never fit


def test_a_server_that_is_shutting_down(rig):
    rig.service.draining = True
    refused(rig.chat(), 503, None, "shutting_down")


def test_what_a_shutdown_cuts_short_is_told_so(rig, engine):
    def replies(call):
        rig.service.draining = True
        return []

    engine.replies = replies
    engine.end = (Finish.ERROR, "the engine was stopped")
    refused(rig.chat(), 503, None, "shutting_down")


# ---- bugs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_an_answer_with_an_id_and_a_traceback_in_the_log(
    engine, rig, monkeypatch, caplog, stream
):
    def generate(*_, **__):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "generate", generate)
    response = rig.chat(stream=stream)
    message = refused(response, 500, None, "internal_error")
    assert response.headers["x-request-id"] in message
    assert "secret" not in message
    assert "ZeroDivisionError: secret detail" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


def test_a_bug_within_a_stream_is_its_last_event(engine, rig, monkeypatch, caplog):
    vocabulary = rig.prompting.vocabulary
    pushed = []

    def text(token):
        pushed.append(token)
        if len(pushed) > 2:
            raise ZeroDivisionError
        return b"x"

    monkeypatch.setattr(vocabulary, "text", text)
    response = rig.chat(stream=True)
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert engine.num_aborted == 1
    metrics = rig.request("GET", "/metrics").text
    assert "quire_unexpected_errors_total 1.0" in metrics
