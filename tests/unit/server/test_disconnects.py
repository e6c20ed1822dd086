"""A client that goes away takes its request with it."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from quire.engine.messages import Finish
from quire.web import sending
from unit.server.scripted import MODEL, Rig, ScriptedEngine

COMPLETIONS = "/v1/completions"
ENDPOINTS = {
    COMPLETIONS: {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


def takes_all(rig: Rig) -> None:
    """Fails unless every place in the queue is free."""
    config = rig.engine.config
    with rig.service.admit(config.max_running + config.max_waiting, MODEL):
        pass


@pytest.fixture(autouse=True)
def _nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not caplog.records


async def abandoned(
    rig: Rig, body: dict, *, after_events: int, path: str = COMPLETIONS
) -> list[dict]:
    """Post as a server would, and disconnect once that many messages have come back."""
    gone = asyncio.Event()
    sent: list[dict] = []
    content = json.dumps({"model": MODEL} | ENDPOINTS[path] | body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict:
        if messages:
            return messages.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)
        if len(sent) == after_events:
            gone.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    running = asyncio.create_task(rig.app(scope, receive, send))
    await rig.engine.held.wait()
    if not after_events:
        gone.set()
    await running
    assert not rig.engine.num_requests  # now, and not when the loop ends
    return sent


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_whole_answer_aborts_every_choice(rig, engine, n):
    engine.hold_after = 1
    sent = asyncio.run(abandoned(rig, {"n": n}, after_events=0))
    assert sent[0]["status"] == 499
    assert engine.num_aborted == n
    assert 'quire_aborts_total{reason="disconnect"} 1.0' in rig.request("GET", "/metrics").text


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_aborts_every_choice(rig, engine, n):
    engine.hold_after = 2
    sent = asyncio.run(abandoned(rig, {"n": n, "stream": True}, after_events=2))
    assert sent[0]["status"] == 200
    assert engine.num_aborted == n


def test_leaving_before_the_first_token_aborts(rig, engine):
    engine.hold_after = 0
    sent = asyncio.run(abandoned(rig, {"stream": True}, after_events=0))
    assert sent[0]["status"] == 499
    assert engine.num_aborted == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_whoever_leaves_leaves_nothing_behind(rig, engine, path, stream):
    engine.hold_after = 1
    after_events = 2 if stream else 0
    asyncio.run(abandoned(rig, {"stream": stream}, after_events=after_events, path=path))
    assert engine.num_aborted == 1
    takes_all(rig)


def test_the_place_in_the_queue_is_free_again(rig, engine):
    engine.hold_after = 1

    async def leave_five_times() -> None:
        for _ in range(5):
            engine.held.clear()
            await abandoned(rig, {"n": 16}, after_events=0)

    asyncio.run(leave_five_times())
    takes_all(rig)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_place_is_free_when_the_engine_fails(rig, engine, path, stream):
    engine.end = (Finish.ERROR, "broken")
    body = {"model": MODEL, "stream": stream} | ENDPOINTS[path]
    assert "broken" in rig.request("POST", path, json=body).text
    takes_all(rig)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_whoever_has_the_last_event_may_ask_again(rig, engine, path, monkeypatch):
    told: list[bytes] = []
    send = sending._send

    async def look(out, event: bytes) -> None:
        told.append(event)
        if b"[DONE]" in event or b"response.completed" in event:
            takes_all(rig)
        await send(out, event)

    monkeypatch.setattr(sending, "_send", look)
    body = {"model": MODEL, "stream": True} | ENDPOINTS[path]
    assert rig.request("POST", path, json=body).status_code == 200
    assert b"[DONE]" in told[-1] or b"response.completed" in told[-1]


def test_leaving_while_the_body_is_on_its_way():
    rig = Rig(ScriptedEngine())
    messages = [
        {"type": "http.request", "body": b'{"model"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[dict] = []

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"100")],
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(rig.app(scope, receive, send))
    assert sent[0]["status"] == 499
    assert not rig.engine.calls
