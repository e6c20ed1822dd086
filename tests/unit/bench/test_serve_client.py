"""One streamed request: timed, read to its end, and everything wrong with its form found."""

import asyncio

import httpx
import msgspec
import pytest

from quire.bench.serve.chatting import ChatAnswer, Chunk, Verdict, _take, stream
from unit.bench.fake_server import chunk, event, usage

BODY = {"model": "fake", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 4}
DONE = event("[DONE]")


def ask(url: str, body: dict = BODY, timeout_s: float = 10.0):
    async def once():
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            return await stream(client, "/v1/chat/completions", body, timeout_s=timeout_s)

    return asyncio.run(once())


def test_a_good_answer(fake, url):
    answer = ask(url)
    assert answer.verdict is Verdict.GOOD
    assert answer.problem == ""
    assert answer.finish_reason == "length"
    assert (answer.prompt_tokens, answer.output_tokens) == (101, 4)
    assert len(answer.text.split()) == 4
    assert answer.cached == {"device": 0, "host": 0, "store": 0, "peer": 0}
    assert 0 < answer.ttft_s <= answer.total_s
    assert answer.tpot_s >= 0
    assert ask(url).cached["device"] == 96
    assert fake.requests[0]["stream_options"] == {"include_usage": True}


def test_what_the_server_does_not_say_is_unknown(fake, url):
    fake.tells_tiers = False
    assert ask(url).cached is None
    fake.stream = lambda _: [event(chunk("a", "stop")), DONE]
    answer = ask(url)
    assert answer.verdict is Verdict.GOOD
    assert (answer.prompt_tokens, answer.output_tokens, answer.tpot_s) == (None, None, None)


def test_a_server_that_knows_hits_but_no_tiers(fake, url):
    told = usage(10, 1, {"cached_tokens": 8})
    fake.stream = lambda _: [event(chunk("a", "stop")), event(told), DONE]
    assert ask(url).cached == {"cached": 8}


def test_an_answer_of_no_text_is_good(fake, url):
    fake.stream = lambda _: [event(chunk("", "stop")), event(usage(5, 1)), DONE]
    answer = ask(url)
    assert (answer.verdict, answer.text) == (Verdict.GOOD, "")
    assert answer.ttft_s is not None


def test_reasoning_is_the_first_that_comes_and_no_text():
    answer = ChatAnswer(Verdict.GOOD)
    for passed_s, delta in ((2.0, {"reasoning_content": "Hm."}), (3.0, {"content": "Yes."})):
        choice = {"delta": delta, "finish_reason": None}
        _take(msgspec.convert({"choices": [choice]}, Chunk), answer, passed_s)
    assert (answer.ttft_s, answer.total_s, answer.text) == (2.0, 3.0, "Yes.")


MALFORMED = {
    "without [DONE]": [event(chunk("a", "stop"))],
    "something follows [DONE]": [event(chunk("a", "stop")), DONE, DONE],
    "in the middle of an event": [event(chunk("a", "stop")), DONE, b"data: x"],
    "without finish_reason": [event(chunk("a")), DONE],
    "follows the one with finish_reason": [event(chunk("a", "stop")), event(chunk("b")), DONE],
    "truncated": [event("{"), DONE],
    "Expected `object`, got `array`": [event("[1]"), DONE],
    "no choices": [event({"id": 1}), DONE],
    "length <= 1 - at `$.choices`": [event({"choices": [{"text": "a"}, {"text": "b"}]}), DONE],
    "neither delta nor text": [event({"choices": [{"index": 0}]}), DONE],
    "got `int` - at `$.choices[0].text`": [event({"choices": [{"text": 7}]}), DONE],
    "can't decode byte 0xff": [b"data: \xff\n\n", DONE],
    "5 tokens came, 4 were asked for": [event(chunk("a", "stop")), event(usage(9, 5)), DONE],
    ">= 0 - at `$.usage.prompt_tokens`": [event(chunk("a", "stop")), event(usage(-1, 1)), DONE],
    "more tokens are said to be cached": [
        event(chunk("a", "stop")),
        event(usage(9, 1, {"cached_tokens_by_tier": {"host": 10}})),
        DONE,
    ],
}


@pytest.mark.parametrize("problem", MALFORMED)
def test_what_is_wrong_in_form_is_found(problem, fake, url):
    fake.stream = lambda _: MALFORMED[problem]
    answer = ask(url)
    assert answer.verdict is Verdict.MALFORMED
    assert problem in answer.problem


def test_an_answer_that_is_no_stream_is_malformed(fake, url):
    fake.content_type = "application/json"
    answer = ask(url)
    assert answer.verdict is Verdict.MALFORMED
    assert "not an event stream" in answer.problem


def test_a_refusal_is_a_failure_in_the_server_s_words(fake, url):
    fake.status_code = 503
    answer = ask(url)
    assert (answer.verdict, answer.problem) == (Verdict.FAILED, "503 too busy")


def test_an_error_in_the_stream_is_a_failure(fake, url):
    fake.stream = lambda _: [event(chunk("a")), event({"error": {"message": "out of luck"}})]
    answer = ask(url)
    assert (answer.verdict, answer.problem) == (Verdict.FAILED, "out of luck")
    assert answer.text == "a"


def test_no_server_is_a_failure():
    answer = ask("http://127.0.0.1:9")
    assert answer.verdict is Verdict.FAILED
    assert "Connect" in answer.problem
