"""Streams: when their status goes out, and what becomes of a failure then."""

import asyncio
import json

import pytest
from prometheus_client import Counter

from quire.errors import InputError
from quire.web.errors import engine_gone
from quire.web.sending import EventStream


def streamed(events, *, waiting_s=0.001):
    """What goes out, and what is raised instead. `events` is given `heard`: set at a comment."""

    async def run():
        heard = asyncio.Event()
        sent = []

        async def send(message):
            sent.append(message)
            if message.get("body") == b": waiting\n\n":
                heard.set()

        async def receive():
            await asyncio.Event().wait()

        stream = EventStream(
            events(heard),
            Counter("aborts", "Of one test.", ("reason",), registry=None),
            lambda e: engine_gone("bug"),
            waiting_s=waiting_s,
        )
        await stream({}, receive, send)
        return sent

    return asyncio.run(run())


def test_a_stream_that_waits_says_so():
    async def events(heard):
        await heard.wait()
        yield b"data: 1\n\n"

    start, *bodies, last = streamed(events)
    assert start["status"] == 200
    assert {body["body"] for body in bodies} == {b": waiting\n\n", b"data: 1\n\n"}
    assert bodies[-1]["body"] == b"data: 1\n\n"
    assert last == {"type": "http.response.body", "body": b""}


FAILURES = [
    (engine_gone("too bad"), {"message": "too bad", "code": "engine_unavailable"}),
    (InputError("n", "too many", code="odd"), {"message": "too many", "param": "n", "code": "odd"}),
    (ValueError("ours"), {"message": "bug"}),
]


@pytest.mark.parametrize(("failure", "told"), FAILURES, ids=["answer", "input", "bug"])
def test_what_fails_after_a_comment_is_an_event(failure, told):
    async def events(heard):
        await heard.wait()
        raise failure
        yield b""

    *_, error, _ = streamed(events)
    found = json.loads(error["body"].removeprefix(b"data: "))["error"]
    assert found | told == found


@pytest.mark.parametrize("failure", [failure for failure, _ in FAILURES[:2]])
def test_what_fails_before_is_an_answer(failure):
    async def events(heard):
        raise failure
        yield b""

    with pytest.raises(type(failure), match="too"):
        streamed(events, waiting_s=600)
