"""Servers that play prefill, decode and unified ones, and a router in front of them.

All on real sockets, in one event loop. A fake generates words that depend on the prompt and the
seed alone, as the real engine does, and can be told to refuse, to wait, to stumble or to die.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from quire.engine.eventlog import EventLog
from quire.router.config import RouterConfig
from quire.router.fleet import Fleet
from quire.router.names import Lookup, lookup
from quire.router.run import run
from quire.server.admin import told_events
from quire.web.config import WebConfig
from quire.web.connections import GuardedConfig
from quire.web.listening import Server, Stop, bind, url_of
from quire.web.routes import router_key

MODEL = "tiny"
WORDS = 8
FAST = {
    "check_interval_s": 0.05,
    "check_timeout_s": 20.0,
    "min_backoff_s": 0.02,
    "max_backoff_s": 0.1,
    "events_interval_s": 0.02,
}
_numbers = itertools.count(1)


def key_of(name: str) -> str:
    """A page key, as its hex."""
    return name.encode().ljust(32, b".").hex()


def words(body: dict[str, Any], index: int = 0) -> list[str]:
    """What any honest fake answers."""
    prompt = body.get("prompt") or body["messages"][-1]["content"]
    return [f"{prompt}{body['seed'] % 97}.{index}.{i} " for i in range(WORDS)]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class FakeServer:
    def __init__(self, role: str = "decode", *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.role = role
        self._host = host
        self.peer = f"tcp://127.0.0.1:{7000 + next(_numbers)}"
        self.fingerprint = "f"
        self.model = MODEL
        self.load = 0
        """Requests there."""
        self.tokens: int | None = 0
        """Of theirs; None: it does not say."""
        self.events: list[dict[str, Any]] = []
        self.log: EventLog | None = None
        """Its events come from there, instead."""
        self.num_present_asked = 0
        self.num_forgotten = 0
        """Events that are no longer to be had."""
        self.keys: dict[str, list[str]] = {}
        """Prompt → its page keys, by name."""
        self.refusal: tuple[int, str] | None = None
        self.keys_refusal: int | None = None
        self.admin_refusal: int | None = None
        self.admin_key = "root"
        self.health_refusal: int | None = None
        self.die_after: int | None = None
        """Chunks of a stream after which it is killed; 0: before it answers at all."""
        self.error_after: tuple[int, str] | None = None
        """Chunks of a stream after which it ends with that error."""
        self.hold_after: int | None = None
        self.pause_after: int | None = None
        """Chunks of a stream after which it waits for `go_on`."""
        self.go_on = asyncio.Event()
        self.tells_together = False
        """A stream and its end come in one piece, as from a server that is fast."""
        self.lies = False
        """Answers something else than others would."""
        self.seen: list[Seen] = []
        self.num_keys_asked = 0
        self.asked_for: list[str | None] = []
        """Whom the router named with that."""
        self.held = asyncio.Event()
        self.left = asyncio.Event()
        """A client went away while it was held."""
        self.is_draining = False
        self.url = ""
        self._port = port
        self._instance = ""

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> FakeServer:
        self._instance = f"instance{next(_numbers)}"
        config = WebConfig(host=self._host, port=self._port, shutdown_grace_s=0.0)
        listener = bind(config)
        listener.listen()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._app(scope, receive, send)

        self._server = Server(GuardedConfig(app, config))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            await asyncio.sleep(0.001)
        self.url = url_of(config, listener)
        self._port = listener.getsockname()[1]
        return self

    def kill(self) -> None:
        """As kill -9 does: nobody listens, and every connection ends where it is."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        self.kill()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    # ---- answers --------------------------------------------------------------------------------

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(content) if content else {}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if path == "/health":
            await self._health(send)
        elif path.startswith("/admin"):
            await self._admin(path, scope["query_string"].decode(), headers, body, send)
        elif path.startswith("/v1/models"):
            await _answer(send, 200, {"object": "list", "data": [{"id": self.model}]})
        else:
            self.seen.append(Seen(path, headers, body))
            await self._generate(path, body, receive, send)

    async def _health(self, send: Any) -> None:
        if self.health_refusal is not None:
            await _fail(send, self.health_refusal, "engine_unavailable")
            return
        about: dict[str, Any] = {"role": self.role, "model": self.model}
        about |= {"instance": self._instance, "draining": self.is_draining}
        if self.tokens is not None:
            about |= {"running_tokens": 0, "waiting_tokens": self.tokens}
        await _answer(send, 200, {"status": "ok", "running": self.load, "waiting": 0} | about)

    async def _admin(
        self, path: str, query: str, headers: dict[str, str], body: dict[str, Any], send: Any
    ) -> None:
        if self.admin_refusal is not None and (
            headers.get("authorization") != f"Bearer {router_key(self.admin_key)}"
        ):
            await _fail(send, self.admin_refusal, "admin_forbidden")
        elif path == "/admin/info":
            about = {"role": self.role, "peer": self.peer, "fingerprint": self.fingerprint}
            await _answer(send, 200, about | {"instance": self._instance})
        elif path == "/admin/events":
            if self.log is not None:
                await _answer(send, 200, {"instance": self._instance} | self._from_log(query))
                return
            since = int(query.removeprefix("since="))
            last = self.num_forgotten + len(self.events)
            answer = {
                "instance": self._instance,
                "last": last,
                "complete": since >= self.num_forgotten,
                "events": self.events[max(since - self.num_forgotten, 0) :],
            }
            await _answer(send, 200, answer)
        else:
            assert path == "/admin/keys"
            self.num_keys_asked += 1
            self.asked_for.append(headers.get("x-quire-client"))
            if self.keys_refusal is not None:
                await _fail(send, self.keys_refusal, "engine_refused")
                return
            keys = self.keys.get(body.get("prompt", ""), [])
            await _answer(send, 200, {"page_size": 16, "num_tokens": 1, "keys": keys})

    def _from_log(self, query: str) -> dict[str, Any]:
        assert self.log is not None
        asked = dict(each.split("=") for each in query.split("&"))
        found = self.log.since(int(asked["since"]), int(asked.get("cursor", 0)))
        self.num_present_asked += not found.complete
        return told_events(found)

    def stores(self, *names: str, tier: str = "device", kind: str = "stored") -> None:
        self.events.append({"kind": kind, "tier": tier, "keys": [key_of(name) for name in names]})

    async def _generate(self, path: str, body: dict[str, Any], receive: Any, send: Any) -> None:
        if self.refusal is not None:
            await _fail(send, *self.refusal)
        elif self.die_after == 0:
            self.kill()
        elif path in ("/tokenize", "/detokenize"):
            await _answer(send, 200, {"path": path, "asked": body})
        elif path == "/v1/responses":
            await self._respond(body, send)
        elif body.get("stream"):
            tell = _Together(send) if self.tells_together else send
            await self._stream(self._chunks(path, body), receive, tell)
        elif self.hold_after is not None:
            await self._hold(receive)
        else:
            texts: dict[int, str] = {}
            for chunk in self._chunks(path, body):
                for choice in chunk["choices"]:
                    said = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    texts[choice["index"]] = texts.get(choice["index"], "") + said
            await _answer(send, 200, {"choices": [{"text": text} for text in texts.values()]})

    async def _stream(self, chunks: list[dict[str, Any]], receive: Any, send: Any) -> None:
        await _begin(send, 200, "text/event-stream")
        for i, chunk in enumerate([*chunks, "[DONE]"]):
            if i == self.die_after:
                await asyncio.sleep(0.01)  # for what was sent to be on its way
                self.kill()
                return
            if self.error_after is not None and i == self.error_after[0]:
                error = {"message": "no", "type": "x", "param": None, "code": self.error_after[1]}
                await _event(send, {"error": error})
                break
            if i == self.hold_after:
                await self._hold(receive)
                return
            if i == self.pause_after:
                await self.go_on.wait()
            await _event(send, chunk)
        await send({"type": "http.response.body"})

    async def _respond(self, body: dict[str, Any], send: Any) -> None:
        name = f"resp_{self._port}_{len(self.seen)}"
        if not body.get("stream"):
            await _answer(send, 200, {"id": name, "output": []})
            return
        await _begin(send, 200, "text/event-stream")
        kinds = ["created", "output_text.delta", "output_text.delta", "completed"]
        for i, kind in enumerate(kinds):
            if i == self.die_after:
                await asyncio.sleep(0.01)  # for what was sent to be on its way
                self.kill()
                return
            event = {"type": f"response.{kind}", "sequence_number": i}
            event |= {"response": {"id": name}} if "delta" not in kind else {"delta": "x"}
            head = f"event: response.{kind}\n"
            data = f"{head}data: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})

    async def _hold(self, receive: Any) -> None:
        self.held.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    def _chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        is_chat = "chat" in path
        base = {"id": f"cmpl-{self.url[-5:]}", "created": self._port, "model": self.model}
        chunks = []
        told = body.get("continue_token_ids") or []
        for index in range(body.get("n") or 1):
            if is_chat:
                opening = {"index": index, "delta": {"role": "assistant", "content": ""}}
                chunks.append(base | {"choices": [opening | {"finish_reason": None}]})
            for i, word in enumerate(words(body, index)):
                said = f"LIE{word}" if self.lies else word
                choice = {"delta": {"content": said}} if is_chat else {"text": said}
                scored = None
                if body.get("logprobs"):
                    entry = {"token": said, "logprob": -float(i)}
                    scored = (
                        {"content": [entry]}
                        if is_chat
                        else {"tokens": [said], "token_logprobs": [-float(i)], "text_offset": [i]}
                    )
                choice |= {"index": index, "logprobs": scored, "finish_reason": None}
                if body.get("return_answer_ids"):
                    choice["token_ids"] = [1000 + i]
                chunks.append(base | {"choices": [choice]})
            assert told == [1000 + i for i in range(len(told))]  # what it has told itself
            end = {"delta": {}} if is_chat else {"text": ""}
            end |= {"index": index, "finish_reason": "length"}
            chunks.append(base | {"choices": [end]})
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append(base | {"choices": [], "usage": {"completion_tokens": WORDS}})
        return chunks


class _Together:
    """Sends all of a body at its end."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {"type": "http.response.body", "body": self._body}
        await self._send(message)


async def _begin(send: Any, status: int, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Any, status: int, content: Any) -> None:
    await _begin(send, status, "application/json")
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _fail(send: Any, status: int, code: str) -> None:
    error = {"message": f"no: {code}", "type": "x", "param": None, "code": code}
    await _answer(send, status, {"error": error})


async def _event(send: Any, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    data = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": data, "more_body": True})


# ---- a router in front of them -------------------------------------------------------------------


@dataclass
class Rig:
    prefill: list[FakeServer]
    decode: list[FakeServer]
    fleet: Fleet
    client: httpx.AsyncClient
    stop: Stop

    async def complete(self, prompt: str = "p", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", None)
        body = {"model": MODEL, "prompt": prompt} | fields
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def chat(self, prompt: str = "p", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}]} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def metric(self, name: str, **labels: str) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.client.get("/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def until(self, url: str, state: str) -> None:
        """Wait for a server's health to be that."""
        await eventually(
            lambda: any(each.url == url and each.state == state for each in self.fleet.members)
        )


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def rig(
    prefill: int | Sequence[FakeServer] = 1,
    decode: int | Sequence[FakeServer] = 1,
    *,
    unified: Sequence[FakeServer] = (),
    absent: Sequence[FakeServer] = (),
    api_key: str | None = None,
    otlp: str | None = None,
    names: Sequence[str] = (),
    look: Lookup = lookup,
    **options: Any,
) -> AsyncIterator[Rig]:
    """Fakes, started here but for those that are absent, and a router. `names`: of unified servers,
    to be looked up."""
    sides = [
        [FakeServer(role) for _ in range(given)] if isinstance(given, int) else [*given]
        for role, given in (("prefill", prefill), ("decode", decode))
    ]
    fakes = [*sides[0], *sides[1], *unified]
    for fake in fakes:
        await fake.start()
    config = RouterConfig(
        prefill=tuple(f.url for f in (*sides[0], *absent) if f.role == "prefill" or f in sides[0]),
        decode=tuple(f.url for f in (*sides[1], *absent) if f.role == "decode" or f in sides[1]),
        servers=(*(fake.url for fake in unified), *names),
        **FAST | {"admin_key": "root"} | options,
    )
    listen = WebConfig(port=0, shutdown_grace_s=0.0, api_key=api_key, otlp=otlp)
    ready: asyncio.Future[tuple[str, Fleet]] = asyncio.get_running_loop().create_future()
    stop = Stop()
    with contextlib.closing(bind(listen)) as listener:
        routing = asyncio.create_task(
            run(
                config,
                listen,
                listener,
                stop,
                lambda url, fleet: ready.set_result((url, fleet)),
                look=look,
            )
        )
        url, fleet = await ready
        try:
            async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
                yield Rig(sides[0], [*sides[1], *unified], fleet, client, stop)
        finally:
            if not stop.is_set:  # the long way has its tests
                routing.cancel()
            await asyncio.gather(routing, return_exceptions=True)
            for fake in fakes:
                await fake.stop()


def texts(response: httpx.Response) -> dict[int, str]:
    """The text of each choice of a stream, after checking how it is put together."""
    assert response.status_code == 200, response.text
    found: dict[int, str] = {}
    finished = set()
    heads = set()
    for chunk in chunks(response):
        heads.add((chunk["id"], chunk["created"]))
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in finished
            said = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[index] = found.get(index, "") + said
            if choice["finish_reason"] is not None:
                finished.add(index)
    assert len(heads) == 1
    assert finished == found.keys()
    return found


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def said(body: dict[str, Any], index: int = 0) -> str:
    return "".join(words(body, index))
