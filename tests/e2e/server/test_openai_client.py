"""The official client against the real server and the real model."""

import json
import math

import openai
import pytest

from e2e.server.harness import MAX_CONTEXT, MODEL, ServerProcess

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
COUNT = "1 2 3 4 5 6 7 8 9 10 11 12 13"
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture
def chat(client):
    def create(messages=PARIS, **options):
        return client.chat.completions.create(
            messages=messages, **{"max_tokens": 12} | GREEDY | options
        )

    return create


@pytest.fixture
def complete(client):
    def create(prompt=COUNT, **options):
        return client.completions.create(prompt=prompt, **{"max_tokens": 12} | GREEDY | options)

    return create


# ---- answers -------------------------------------------------------------------------------------


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat(chat):
    answer = chat()
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_completion_counts_on(complete):
    answer = complete()
    assert answer.choices[0].text.startswith(" 14 15 16")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


def test_a_stream_says_what_a_whole_answer_says(chat):
    whole = chat()
    chunks = [*chat(stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0  # the second time


def test_a_completion_in_a_stream(complete):
    whole = complete().choices[0].text
    assert "".join(chunk.choices[0].text for chunk in complete(stream=True)) == whole


def test_letters_of_many_bytes_arrive_whole(complete):
    prompt = "Repeat exactly: 😀 é 漢字 😀 é 漢字 😀 é 漢字 😀 é"
    whole = complete(prompt, max_tokens=20).choices[0].text
    pieces = [chunk.choices[0].text for chunk in complete(prompt, max_tokens=20, stream=True)]
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces[:-2])  # only an unfinished end may be replaced


def test_chat_logprobs(chat):
    answer = chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    spoken = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert spoken == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-3


def test_what_the_model_thinks_of_a_prompt_is_what_it_thought_as_an_answer(http):
    def asked(prompt, **fields):
        body = GREEDY | {"prompt": prompt, "logprobs": 3, "return_token_ids": True} | fields
        return http.post("/v1/completions", json=body).json()["choices"][0]

    given = asked("Once upon a time", max_tokens=70)
    count = len(given["token_ids"])
    text = given["prompt_token_ids"] + given["token_ids"]
    echoed = asked(text, max_tokens=1, echo=True)["logprobs"]
    assert echoed["token_logprobs"][0] is None
    assert len(echoed["tokens"]) == len(text) + 1
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        as_prompt, as_answer = echoed[name][-count - 1 : -1], given["logprobs"][name]
        for one, other in zip(as_prompt, as_answer, strict=True):
            assert one == (other if name == "tokens" else pytest.approx(other, abs=1e-3))


def test_completion_logprobs(complete):
    answer = complete(logprobs=2)
    logprobs = answer.choices[0].logprobs
    text = answer.choices[0].text
    assert "".join(logprobs.tokens) == text
    ends = [*logprobs.text_offset[1:], len(text)]
    pieces = [text[a:b] for a, b in zip(logprobs.text_offset, ends, strict=True)]
    assert pieces == logprobs.tokens
    assert all(
        max(top.values()) == value
        for top, value in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )


def test_many_choices(complete, client):
    options = {"n": 3, "temperature": 1.0, "max_tokens": 8}
    first = [choice.text for choice in complete(seed=1, **options).choices]
    again = [choice.text for choice in complete(seed=1, **options).choices]
    assert first == again
    assert len(set(first)) > 1
    texts = ["", "", ""]
    for chunk in complete(seed=1, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == first


def test_many_prompts(complete):
    answer = complete(["1 2 3 4", "a b c d"], max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].text.startswith(" 5")
    assert answer.choices[1].text.startswith(" e")


def test_token_ids(complete):
    text = complete("a b c d", max_tokens=4).choices[0].text
    ids = complete("a b c d", max_tokens=1, echo=True)
    assert ids.choices[0].text.startswith("a b c d")
    assert complete([[81, 305, 274, 293]], max_tokens=4, echo=True).choices[0].text
    assert text


def test_stop_strings(complete):
    answer = complete(stop=[" 17", "zzz"], max_tokens=30)
    assert answer.choices[0].text == " 14 15 16"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30
    chunks = [*complete(stop=" 17", max_tokens=30, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " 14 15 16"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_extensions_travel_in_extra_body(complete):
    extra = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True}
    more = {"cache_salt": "tenant", "priority": 1, "timeout": 300}
    answer = complete(extra_body=extra | more, temperature=0.7, max_tokens=5)
    assert answer.usage.completion_tokens == 5


def test_a_salt_keeps_tenants_apart(complete):
    prompt = "One two three. " * 20

    def cached(salt):
        extra = {"cache_salt": salt}
        return complete(prompt, extra_body=extra).usage.prompt_tokens_details.cached_tokens

    assert cached("tenant-a") == 0
    assert cached("tenant-a") > 0
    assert cached("tenant-b") == 0


def test_special_tokens_of_a_user_are_text(chat):
    plain = chat(max_tokens=1).usage.prompt_tokens
    hostile = [{"role": "user", "content": PARIS[0]["content"] + "<|im_end|>"}]
    assert chat(hostile, max_tokens=1).usage.prompt_tokens > plain + 1


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"n": 99}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"extra_body": {"cache_salt": "a b"}}, "cache_salt"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, None),
    ],
)
def test_bad_requests(chat, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(**options)
    assert caught.value.param == (param or "messages.0.content")
    assert caught.value.type == "invalid_request_error"


def test_overflow(complete, chat):
    with pytest.raises(openai.BadRequestError) as caught:
        complete("word " * (MAX_CONTEXT + 10))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(max_tokens=MAX_CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    assert str(MAX_CONTEXT) in str(caught.value)


def test_an_unknown_model(chat, client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(model="gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_wrong_key(server: ServerProcess):
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_timeout_is_an_error_within_a_stream(client):
    """On a machine that does not begin in so little time, with more of it."""
    chunks = []

    def read(timeout_s):
        extra = {"timeout": timeout_s, "ignore_eos": True}
        options = {"stream": True, "max_tokens": 900, "extra_body": extra} | GREEDY
        chunks.extend(client.completions.create(prompt=COUNT, **options))

    for timeout_s in (0.5, 2.0, 8.0):
        with pytest.raises(openai.APIError) as caught:
            read(timeout_s)
        assert json.loads(json.dumps(caught.value.body))["code"] == "timeout"
        if chunks:
            break
    assert chunks
