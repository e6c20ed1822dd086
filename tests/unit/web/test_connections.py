"""The server on a real socket, with clients that do not behave. The engine is scripted."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import URL
from starlette.requests import HTTPConnection

from quire.engine.messages import GetRequests, Requests
from quire.server.config import ServerConfig
from quire.web.connections import GuardedConfig
from quire.web.listening import Server, bind, url_of
from quire.web.routes import router_key
from unit.server.scripted import ADMIN_KEY, MODEL, Rig, ScriptedEngine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()
GOOD = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


WAIT_S = 120.0
"""Only how long a broken test takes to fail."""


@dataclass
class Live:
    url: str
    port: int
    rig: Rig
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """All connections, and until they are: or one is collected when its loop is gone."""
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def talk(self, *pieces: bytes, pause_s: float = 0.0) -> tuple[int, Any]:
        """Send pieces; (status, body) of the first answer, then the end of the connection."""
        reader, writer = await self.open()
        answer = bytearray()

        async def listen() -> None:  # at once: what comes before a reset must not get lost
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    answer.extend(data)

        listening = asyncio.create_task(listen())
        with contextlib.closing(writer):
            for piece in pieces:
                with contextlib.suppress(ConnectionError):
                    writer.write(piece)
                    await writer.drain()
                await asyncio.sleep(pause_s)
            await asyncio.wait_for(listening, WAIT_S)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        return int(head.split()[1]), json.loads(body)["error"]


@contextlib.asynccontextmanager
async def live(**options: Any) -> AsyncIterator[Live]:
    config = replace(ServerConfig(port=0, shutdown_grace_s=0.0), **options)
    rig = Rig(ScriptedEngine(), config)
    listener = bind(config)
    guarded = GuardedConfig(rig.app, config)
    server = Server(guarded)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    url = url_of(config, listener)
    live = Live(url, int(url.rpartition(":")[2]), rig)
    try:
        yield live
        await live.close()
        guarded.server = ServerConfig()  # patient again
        async with httpx.AsyncClient(base_url=url) as client:  # it still answers
            assert (await client.get("/health")).status_code == 200
    finally:
        server.should_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await serving


async def slow_head() -> None:
    async with live(head_timeout_s=0.1) as server:
        status, error = await server.talk(b"GET /health HT", b"TP/1.1\r\n", b"A: b\r\n")
        assert (status, error["code"]) == (408, "slow_head")


async def silence() -> None:
    async with live(head_timeout_s=0.1) as server:
        status, error = await server.talk()
        assert (status, error["code"]) == (408, "slow_head")


async def trickle() -> None:
    """Byte after byte does not start the clock anew."""
    async with live(head_timeout_s=0.2) as server:
        drops = [b"G", b"E", b"T", b" ", b"/", *[b"x"] * 40]
        status, error = await server.talk(*drops, pause_s=0.02)
        assert (status, error["code"]) == (408, "slow_head")


async def slow_second_head() -> None:
    """The clock runs for each request of a connection, not between them."""
    async with live(head_timeout_s=0.3) as server:
        reader, writer = await server.open()
        with contextlib.closing(writer):
            for _ in range(3):
                writer.write(GET)
                assert b'"status":"ok"' in await reader.readuntil(b"}")
                await asyncio.sleep(0.15)
            await asyncio.sleep(0.3)
            writer.write(GET)
            assert b'"status":"ok"' in await reader.readuntil(b"}")
            writer.write(b"GET /hea")
            assert b" 408 " in await asyncio.wait_for(reader.read(), WAIT_S)


async def slow_body() -> None:
    async with live(body_timeout_s=0.1) as server:
        head = HEAD + b"Content-Length: 100\r\n\r\n"
        status, error = await server.talk(head, b"{", b'"')
        assert (status, error["code"]) == (408, "slow_body")
        assert not server.rig.engine.calls


async def slow_body_nobody_reads() -> None:
    """A path that takes no body must not keep the connection for it."""
    async with live(body_timeout_s=0.1) as server:
        head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        status, _ = await server.talk(head)
        assert status == 404


async def large_declared_body() -> None:
    async with live(max_body_bytes=1000) as server:
        head = HEAD + b"Content-Length: 99999999999\r\n\r\n"
        status, error = await server.talk(head, b"{")
        assert (status, error["code"]) == (413, "body_too_large")


async def large_chunked_body() -> None:
    async with live(max_body_bytes=1000) as server:
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        chunk = b"200\r\n" + b"x" * 0x200 + b"\r\n"
        status, error = await server.talk(head, *[chunk] * 20)
        assert (status, error["code"]) == (413, "body_too_large")


async def large_body_of_a_client() -> None:
    """What is not much too large is read to its end, so that the client sees the answer."""
    async with live(max_body_bytes=100_000) as server, httpx.AsyncClient() as client:
        for _ in range(2):
            body = {"model": MODEL, "prompt": "x" * 300_000}
            response = await client.post(server.url + "/v1/completions", json=body)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"


async def large_head() -> None:
    async with live(max_head_bytes=4096) as server:
        status, error = await server.talk(b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000)
        assert status == 431


async def junk() -> None:
    async with live() as server:
        for data in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
            b"\x00" * 100 + b"\r\n\r\n",
            b"GET / HTTP/x.y\r\n\r\n",
            b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",  # no Host
            HEAD + b"Content-Length: -5\r\n\r\n",
            HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
            HEAD + b"Transfer-Encoding: nonsense\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        ):
            status, _ = await server.talk(data)
            assert status in (400, 501), data


async def too_many_connections() -> None:
    async with live(max_connections=2) as server:
        first, second = await server.open(), await server.open()
        for reader, writer in (first, second):
            writer.write(GET)
            assert b"200" in await reader.readuntil(b"}")
        status, error = await server.talk(GET)
        assert (status, error["code"]) == (503, "too_many_connections")
        for _, writer in (first, second):
            writer.close()
            await writer.wait_closed()
        while True:
            reader, writer = await server.open()
            with contextlib.closing(writer):
                writer.write(GET)
                if b" 200 " in await reader.readline():
                    break


async def keep_alive() -> None:
    async with live() as server:
        reader, writer = await server.open()
        with contextlib.closing(writer):
            for _ in range(3):
                writer.write(GOOD)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in head
                (length,) = [
                    int(line.split()[1])
                    for line in head.splitlines()
                    if line.lower().startswith(b"content-length")
                ]
                assert b"hello there" in await reader.readexactly(length)


async def pipelining() -> None:
    async with live() as server:
        reader, writer = await server.open()
        with contextlib.closing(writer):
            writer.write(GET * 3)
            for _ in range(3):
                assert b" 200 " in await reader.readuntil(b"}")


async def a_reader_that_does_not_read() -> None:
    """What piles up for a client is bounded, and so is the time it may lie there."""
    async with live(write_timeout_s=0.1) as server:
        engine = server.rig.engine
        engine.info = msgspec.structs.replace(engine.info, max_context=200_000)
        engine.replies = lambda call: [65] * 100_000
        asked = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 150_000}
        body = json.dumps(asked).encode()
        reader, writer = await server.open()
        with contextlib.closing(writer):
            writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.wait_for(engine.aborted.wait(), WAIT_S)
        assert engine.num_requests == 0


async def a_client_that_leaves() -> None:
    async with live() as server:
        server.rig.engine.hold_after = 1
        for stream in (False, True):
            server.rig.engine.aborted.clear()
            server.rig.engine.held.clear()
            body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
            _, writer = await server.open()
            writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.wait_for(server.rig.engine.held.wait(), WAIT_S)
            writer.close()
            await asyncio.wait_for(server.rig.engine.aborted.wait(), WAIT_S)


async def expecting_to_continue() -> None:
    async with live(max_body_bytes=1000) as server:
        head = HEAD + b"Expect: 100-continue\r\n"
        reader, writer = await server.open()
        with contextlib.closing(writer):
            writer.write(head + f"Content-Length: {len(BODY)}\r\n\r\n".encode())
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(BODY)
            assert b" 200 " in await reader.readline()
        status, _ = await server.talk(head + b"Content-Length: 2000\r\n\r\n")
        assert status == 413


@pytest.mark.parametrize(
    "scene",
    [
        slow_head,
        silence,
        trickle,
        slow_second_head,
        slow_body,
        slow_body_nobody_reads,
        large_declared_body,
        large_chunked_body,
        large_body_of_a_client,
        large_head,
        junk,
        too_many_connections,
        keep_alive,
        pipelining,
        a_reader_that_does_not_read,
        a_client_that_leaves,
        expecting_to_continue,
    ],
)
def test_on_the_wire(scene):
    asyncio.run(scene())


async def asked(server: Live, path: str, host: str, key: str = "") -> tuple[int, bytes]:
    """Status and body; an older answer will do."""
    reader, writer = await server.open()
    about = f"Host: {host}\r\nAuthorization: Bearer {key}\r\nCache-Control: max-age=999\r\n"
    writer.write(f"GET {path} HTTP/1.1\r\n{about}Connection: close\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def url_with_any_host(connection: HTTPConnection) -> URL:
    """As older versions of Starlette put it together: of whatever the client calls the host."""
    return URL(f"http://{connection.headers['host']}{connection.scope['path']}")


@pytest.mark.parametrize("is_old", [False, True])
def test_which_path_was_asked_for_is_not_for_the_host_to_say(monkeypatch, is_old):
    """An admin's answer had been given to others, and a router's key had opened all of /admin."""
    if is_old:
        monkeypatch.setattr(HTTPConnection, "url", property(url_with_any_host))

    async def scene():
        async with live(admin_key=ADMIN_KEY) as server:
            server.rig.engine.answers[GetRequests] = Requests([])
            requests = (200, b'{"requests":[]}')
            assert await asked(server, "/admin/requests", "x", ADMIN_KEY) == requests
            status, body = await asked(server, "/metrics", "x/admin/requests#")
            assert status in (200, 400)
            assert (b"quire_engine_up" in body) is (status == 200)
            assert await asked(server, "/admin/requests", "x/metrics#", ADMIN_KEY) == requests
            status, _ = await asked(
                server, "/admin/requests", "x/admin/info#", router_key(ADMIN_KEY)
            )
            assert status in (400, 401)
            assert (await asked(server, "/nowhere", "x/somewhere#"))[1].count(b"/nowhere") == 1

    asyncio.run(scene())
