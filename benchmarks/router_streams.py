"""What the router costs with many streams on one core: its CPU, and how much later tokens come.

    python benchmarks/router_streams.py --streams 2000 --rate 5 --seconds 20

Real sockets, three processes: a server that plays an engine and tells each stream a token at a
fixed pace, the router (`quire route`, on the first core), and clients (on the others). The same
without the router, straight from the server, is what it is compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

_READY = re.compile(r"ready at (http://\S+)")
_SLOTS = 20
"""Into which a token's time is cut: streams are told in turns, not all at one instant."""
_TOLD = re.compile(rb'"content":"(\d+)"')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk_of(token: int, *, has_ids: bool) -> bytes:
    """As a server tells it; its text is when it was told."""
    choice: dict[str, Any] = {
        "index": 0,
        "delta": {"content": str(time.monotonic_ns())},
        "logprobs": None,
        "finish_reason": None,
    }
    if has_ids:
        choice["token_ids"] = [token]
    chunk = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "paced",
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


# ---- the server ----------------------------------------------------------------------------------


class Paced(asyncio.Protocol):
    """One connection of the played server."""

    streams: list[tuple[Paced, bool]] = []  # noqa: RUF012 - of the whole process

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head.lower())
        length = int(size[1]) if size else 0
        if not found or len(rest) < length:
            return
        self._buffer = b""
        if head.startswith(b"POST"):
            self.transport.write(_HEAD)
            self.streams.append((self, b"return_answer_ids" in rest))
            return
        status, body = "401 Unauthorized", b"{}"
        if head.startswith(b"GET /health"):
            said = {"status": "ok", "role": "unified", "model": "paced", "instance": "i"}
            status, body = "200 OK", json.dumps(said).encode()
        answer = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self.transport.write(answer + body)

    def tell(self, event: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))


def serve(says: Connection, rate: float) -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Paced, "127.0.0.1", 0, backlog=4096)
        says.send(server.sockets[0].getsockname()[1])
        turn, due = 0, loop.time()
        while True:
            due += 1 / rate / _SLOTS
            await asyncio.sleep(max(0.0, due - loop.time()))
            for stream, has_ids in Paced.streams[turn % _SLOTS :: _SLOTS]:
                if not stream.transport.is_closing():
                    stream.tell(chunk_of(turn % 1000, has_ids=has_ids))
            turn += 1

    _stay_off_the_first_core()
    asyncio.run(play())


# ---- the clients ---------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    delays: list[int] = []  # noqa: RUF012 - of the whole process
    is_counting = False

    def __init__(self, request: bytes) -> None:
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if Client.is_counting:
            now = time.monotonic_ns()
            Client.delays += [now - int(told) for told in _TOLD.findall(data)]


async def ask(port: int, num_streams: int, seconds: float, router: int | None) -> dict[str, float]:
    body = json.dumps(
        {"model": "paced", "stream": True, "messages": [{"role": "user", "content": "go on"}]}
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    loop = asyncio.get_running_loop()
    transports = []
    for _ in range(num_streams):
        transport, _ = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        transports.append(transport)
    await asyncio.sleep(3.0)  # until all have begun
    process = psutil.Process(router) if router else None
    used = sum(process.cpu_times()[:2]) if process else 0.0
    began, Client.delays, Client.is_counting = time.monotonic(), [], True
    await asyncio.sleep(seconds)
    Client.is_counting = False
    took = time.monotonic() - began
    used = (sum(process.cpu_times()[:2]) if process else 0.0) - used
    for transport in transports:
        transport.abort()
    delays = sorted(Client.delays)
    return {
        "tokens_s": len(delays) / took,
        "core": used / took,
        "us_per_token": used / max(1, len(delays)) * 1e6,
        "median_ms": statistics.median(delays) / 1e6 if delays else float("nan"),
        "p99_ms": delays[int(0.99 * len(delays))] / 1e6 if delays else float("nan"),
    }


# ---- together ------------------------------------------------------------------------------------


def _stay_off_the_first_core() -> None:
    others = sorted(os.sched_getaffinity(0))[1:]
    if others:
        os.sched_setaffinity(0, others)


def _route(port: int, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    log = folder / "router.log"
    command = [sys.executable, "-m", "quire.cli", "route", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--server", f"http://127.0.0.1:{port}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    os.sched_setaffinity(process.pid, sorted(os.sched_getaffinity(0))[:1])
    for _ in range(600):
        if found := _READY.search(log.read_text()):
            return process, int(found[1].rpartition(":")[2])
        time.sleep(0.1)
    process.kill()
    raise SystemExit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    hears, says = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(says, given.rate), daemon=True
    )
    server.start()
    port = hears.recv()
    with tempfile.TemporaryDirectory() as folder:
        router, routed = _route(port, Path(folder))
        _stay_off_the_first_core()
        try:
            for name, at, pid in (("straight", port, None), ("by the router", routed, router.pid)):
                found = asyncio.run(ask(at, given.streams, given.seconds, pid))
                print(f"{name:14}", "  ".join(f"{what} {x:.2f}" for what, x in found.items()))
                time.sleep(2.0)
        finally:
            router.terminate()
            router.wait()
            server.kill()


if __name__ == "__main__":
    main()
