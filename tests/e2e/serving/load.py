"""Many impatient clients at once: what each of them got, and what it cost the server's processes.

Each client, again and again: pick a prompt, a salt and a length; then read to the end, or leave: in
the middle, before the first token, or by cutting the connection without a word. Every answer must
be complete, an error in OpenAI's format, or cut by us. Anything else is a problem.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from e2e.serving.chats import PLACES, first_turn
from e2e.serving.client import Messages
from e2e.serving.server import MODEL, Server
from quire.bench.serve.chatting import EventParser

NUM_CLIENTS = 64
MAX_TOKENS = 16
SALTS = (None, None, "tenant-a", "tenant-b")
QUESTIONS = ("", "What is paid for?", "When do people come, and when do they go?")
PATIENCE_S = 300.0
"""Nobody waits longer for an answer: the test is broken then."""

_ALLOWED = {429: "overloaded", 503: "unavailable", 504: "timeout_error"}


class Fate(enum.Enum):
    """What the client means to do."""

    READ = "read to the end"
    LEAVE = "leave after some tokens"
    CANCEL = "leave at some time"
    RESET = "reset the connection"


_FATES = [Fate.READ] * 14 + [Fate.LEAVE] * 3 + [Fate.CANCEL] * 2 + [Fate.RESET]


class End(enum.Enum):
    COMPLETE = "completed"
    CUT = "disconnected"
    ERROR = "refused"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: int
    body: dict[str, Any]
    fate: Fate
    patience: float
    """Events or seconds, for those who leave."""

    @property
    def is_greedy(self) -> bool:
        return not self.body["temperature"]


@dataclass(frozen=True)
class Result:
    ask: Ask
    end: End
    status: int = 200
    text: str = ""
    finish: str = ""
    problem: str = ""


@dataclass
class Sample:
    """One process at one time."""

    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass
class Outcome:
    results: list[Result] = field(default_factory=list)
    samples: list[dict[str, Sample]] = field(default_factory=list)
    """By process, about every second."""

    def count(self, end: End) -> int:
        return sum(result.end is end for result in self.results)

    @property
    def refusals(self) -> Counter[int]:
        return Counter(result.status for result in self.results if result.end is End.ERROR)


def prompts() -> list[Messages]:
    """A few documents, each asked about more than once."""
    chats: list[Messages] = []
    for place in PLACES[:4]:
        (turn,) = first_turn(place)
        chats += [[turn | {"content": turn["content"] + question}] for question in QUESTIONS]
    return chats


async def load(server: Server, seconds: float, seed: int = 1) -> Outcome:
    """For so long, and until every client has had a whole answer."""
    outcome = Outcome()
    deadline = time.monotonic() + seconds
    chats = prompts()

    async def be_a_client(chance: random.Random) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            served = False
            while time.monotonic() < deadline or not served:
                result = await _ask(client, _invent(chance, chats))
                outcome.results.append(result)
                if result.end is End.PROBLEM:
                    return
                served = served or result.end is End.COMPLETE
                if result.status == 429:
                    await asyncio.sleep(chance.uniform(0.5, 1.5))

    async with _watching(server, outcome):
        await asyncio.gather(
            *(be_a_client(random.Random(f"{seed}-{i}")) for i in range(NUM_CLIENTS))
        )
    return outcome


def _invent(chance: random.Random, chats: Sequence[Messages]) -> Ask:
    prompt = chance.randrange(len(chats))
    fate = chance.choice(_FATES)
    body = {
        "model": MODEL,
        "messages": chats[prompt],
        "max_tokens": chance.randint(1, MAX_TOKENS),
        "temperature": chance.choice((0.0, 0.0, 0.0, 0.8)),
        "cache_salt": chance.choice(SALTS),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if chance.random() < 0.05:
        body["timeout"] = chance.uniform(0.5, 5.0)
    events = chance.randint(1, 6)
    return Ask(prompt, body, fate, chance.uniform(0.0, 3.0) if fate is Fate.CANCEL else events)


# ---- one request ---------------------------------------------------------------------------------


async def _ask(client: httpx.AsyncClient, ask: Ask) -> Result:
    try:
        if ask.fate is Fate.RESET:
            return await _reset(client, ask)
        if ask.fate is Fate.CANCEL:
            try:
                async with asyncio.timeout(ask.patience):
                    return await _stream(client, ask)
            except TimeoutError:
                return Result(ask, End.CUT)
        return await _stream(client, ask)
    except (httpx.HTTPError, OSError, ValueError, KeyError, AssertionError) as error:
        return Result(ask, End.PROBLEM, problem=f"{ask.fate.value}: {error!r}")


async def _stream(client: httpx.AsyncClient, ask: Ask) -> Result:
    """Raises AssertionError, ValueError or KeyError for an answer that is not in order."""
    async with client.stream("POST", "/v1/chat/completions", json=ask.body) as response:
        if response.status_code != 200:
            error = json.loads(await response.aread())["error"]
            return _refused(ask, response.status_code, error)
        assert response.headers["content-type"].startswith("text/event-stream")
        parser = EventParser()
        events: list[str] = []
        async for piece in response.aiter_raw():
            events += parser.feed(piece)
            if ask.fate is Fate.LEAVE and len(events) >= ask.patience:
                return Result(ask, End.CUT)
    assert parser.is_between_events, "the stream ended in the middle of an event"
    return _judge(ask, events)


def _judge(ask: Ask, events: list[str]) -> Result:
    *chunks, last = events
    if last != "[DONE]":
        error = json.loads(last)["error"]
        status = next((s for s, kind in _ALLOWED.items() if kind == error["type"]), 500)
        return _refused(ask, status, error)
    *answers, end = map(json.loads, chunks)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in answers)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in answers]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) == {None}
    usage = end["usage"]
    assert 1 <= usage["completion_tokens"] <= ask.body["max_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    return Result(ask, End.COMPLETE, text=text, finish=reasons[-1])


def _refused(ask: Ask, status: int, error: dict[str, Any]) -> Result:
    assert _ALLOWED.get(status) == error["type"], f"{status} {error}"
    assert error["message"]
    return Result(ask, End.ERROR, status)


async def _reset(client: httpx.AsyncClient, ask: Ask) -> Result:
    """Ask, and hang up without a word: the server's next write meets a reset."""
    url = client.base_url
    body = json.dumps(ask.body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(ask.patience / 2):
                await reader.readline()
        line = writer.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return Result(ask, End.CUT)


# ---- the processes -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _watching(server: Server, outcome: Outcome) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            outcome.samples.append(sample(server))
            await asyncio.sleep(1.0)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def sample(server: Server) -> dict[str, Sample]:
    return {
        name: Sample(process.memory_info().rss, process.num_fds(), process.num_threads())
        for name, process in {
            "server": psutil.Process(server.process.pid),
            "engine": server.engine,
        }.items()
    }
