"""A client that wants to reach, through the router, what is not meant for it.

The router and the server behind it are the real ones, on real sockets; the engine is scripted.
Requests are written byte by byte, as no client library would. What the server gets to see is
noted before any of its code runs.
"""

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from quire.engine.messages import GetStatus
from quire.router.config import RouterConfig
from quire.router.run import run as run_router
from quire.server.config import ServerConfig
from quire.web.config import WebConfig
from quire.web.connections import GuardedConfig
from quire.web.listening import Server, Stop, bind, url_of
from unit.router.fakes import FAST, rig
from unit.server.scripted import MODEL, Rig, ScriptedEngine, status

PASSED_ON = {"/v1/chat/completions", "/v1/completions", "/v1/models"}
OWN = {"/health", "/admin/info"}
"""What the router asks by itself of a single server."""
SECRETS = ("/admin/cache", "/admin/store", "/admin/requests", "/metrics", "/openapi.json")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
UPS = ("..", "%2e%2e", "%2E.", ".%2e", "..;", "%252e%252e", "..%00", "%c0%ae%c0%ae", "..%5c")
SLASHES = ("/", "%2f", "%2F", "//", "%5c", "\\", "%252f", "/./", "%2f%2e%2f")
TAILS = ("", "?", "?check=true", "?x=/../admin/cache", "#", "%3fcheck=true", "%23", ";a=b", "%20")


def targets(seed: int, count: int) -> list[str]:
    """Request targets that somebody might hope for: every way of writing, put together by seed."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        secret, up, slash = rng.choice(SECRETS), rng.choice(UPS), rng.choice(SLASHES)
        start = rng.choice(
            ("/v1/models/", "/v1/models", "/v1/chat/completions/", "/v1/", "/", "//")
        )
        climb = slash.join([up] * rng.randint(1, 4))
        goal = rng.choice((secret, quote(secret, safe=""), secret.replace("/", slash)))
        found.append(start + climb + rng.choice((slash, "")) + goal + rng.choice(TAILS))
    return found


PLAIN = [
    "/v1/models/..%2f..%2fadmin%2fcache",
    "/v1/models/../../admin/cache",
    "/v1/models/%2e%2e/%2e%2e/admin/cache",
    "/v1/models//admin/cache",
    "/v1/models/@127.0.0.1/admin/cache",
    "/v1/models/tiny/../../../admin/cache",
    "/v1/models/tiny?/../../admin/cache",
    "/v1/models?/../../admin/cache",
    "/v1/../admin/cache",
    "/admin/cache",
    "//admin/cache",
    "http://127.0.0.1/admin/cache",
    "http://evil.example/v1/models/..%2f..%2fadmin%2fcache",
    "http://127.0.0.1/v1/models/..%2f..%2fadmin%2fcache",
    "/v1/models/..%2f..%2f..%2f..%2fadmin%2fstore?url=x",
    "*",
]


@dataclass
class Door:
    """The router's port, and what has come through it."""

    port: int
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, query), as the server got them."""

    async def send(self, method: str, target: str, *headers: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
        writer.write("\r\n".join([*lines, "Content-Length: 0", "", ""]).encode("latin-1"))
        try:
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def door():
    """With a key between router and server, which the attacker does not have."""
    rig = Rig(ScriptedEngine(), ServerConfig(admin_key="root"))
    rig.engine.status = status()
    rig.engine.answers = {GetStatus: status()}
    seen: list[tuple[str, str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            query = scope["query_string"].decode()
            seen.append((scope["method"], scope["raw_path"].decode(), query))
        await rig.app(scope, receive, send)

    config = WebConfig(port=0, shutdown_grace_s=0.0)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = Stop()
    with contextlib.closing(bind(config)) as behind, contextlib.closing(bind(config)) as front:
        behind.listen()
        server = Server(GuardedConfig(app, config))
        serving = asyncio.create_task(server.serve(sockets=[behind]))
        options = FAST | {"check_interval_s": 60.0}
        fleet = RouterConfig(servers=(url_of(config, behind),), admin_key="root", **options)
        routing = asyncio.create_task(
            run_router(fleet, config, front, stop, lambda url, _: ready.set_result(url))
        )
        await ready
        try:
            yield Door(front.getsockname()[1], seen)
        finally:
            stop.set(soon=True)
            await routing
            server.should_exit = True
            await serving


def attack(method: str, paths: list[str]) -> None:
    async def main() -> None:
        async with door() as way:
            for target in paths:
                reply = await way.send(method, target, "X-Quire-Admin-Key: guess")
                assert b'"tiers"' not in reply, target
                assert b"redis" not in reply, target
            wrong = [each for each in way.seen if each[1] not in PASSED_ON | OWN or each[2]]
            assert not wrong

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("method", METHODS)
def test_no_way_of_writing_a_path_reaches_more_than_it_names_c49(method):
    attack(method, PLAIN)


@pytest.mark.parametrize("seed", range(4))
def test_nor_does_any_that_chance_puts_together_c49(seed):
    attack("GET", targets(seed, 150))


def test_one_model_is_found_by_its_name_and_no_other_c49():
    async def main() -> None:
        async with (
            door() as way,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{way.port}", trust_env=False) as client,
        ):
            found = await client.get(f"/v1/models/{MODEL}")
            assert found.json() == (await client.get("/v1/models")).json()["data"][0]
            for name in ("gpt-9", f"{MODEL}/", f"{MODEL}%2f..", "%00", "a/b/c"):
                missing = await client.get(f"/v1/models/{name}")
                assert missing.status_code == 404
                assert missing.json()["error"]["code"] == "model_not_found"

    asyncio.run(asyncio.wait_for(main(), 120))


# ---- a server that is not what it should be ------------------------------------------------------


class Evil:
    """Answers with whatever it is given."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    async def __call__(self, path: str, body: Any, receive: Any, send: Any) -> None:
        headers = [(k.encode(), v.encode()) for k, v in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


JSON = {"content-type": "application/json"}
HTML = b"<script>document.cookie</script>"


@pytest.mark.parametrize(
    ("evil", "status", "expected"),
    [
        (Evil(200, {"content-type": "text/html"}, HTML), 503, None),
        (Evil(200, {"content-type": "text/html", "set-cookie": "a=b"}, b"{}"), 200, b"{}"),
        (Evil(200, JSON, b"[1, 2]"), 503, None),
        (Evil(302, {"location": "http://evil.example/"}, b""), 502, None),
        (Evil(418, JSON | {"x-evil": "1"}, b'{"error": {"message": "a\\r\\nb"}}'), 502, None),
        (Evil(401, JSON | {"www-authenticate": "Basic realm=x"}, b"{}"), 401, None),
        (Evil(400, JSON | {"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, b"{}"), 400, None),
    ],
)
def test_what_a_server_answers_is_an_answer_and_no_more(evil, status, expected):
    async def main():
        async with rig(1, 1) as router:
            router.decode[0]._generate = evil
            response = await router.complete()
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"
            names = {"set-cookie", "location", "x-evil", "server"}
            assert not names & {name.lower() for name in response.headers}
            assert response.headers.get("www-authenticate", "Bearer") == "Bearer"
            assert "9999" not in str(response.headers)
            assert b"script" not in response.content
            if expected is not None:
                assert response.content == expected
            else:
                assert response.json()["error"]["message"].isprintable()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_event_of_a_server_is_one_event():
    """JSON may have line breaks; in a stream of events these begin something else."""
    chunk = b'data: {"choices": [{"index": 0,\n"text": "hi"}]}\n\n'
    evil = Evil(200, {"content-type": "text/event-stream"}, chunk + b"data: [DONE]\n\n")

    async def main():
        async with rig(1, 1) as router:
            router.decode[0]._generate = evil
            response = await router.complete(stream=True)
            first, done, empty = response.text.split("\n\n")
            assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "hi"
            assert (done, empty, "\n" in first) == ("data: [DONE]", "", False)

    asyncio.run(asyncio.wait_for(main(), 60))
