"""A socket, a server on it, whoever traces its requests, and how it is told to stop.

    SIGTERM   finish what runs, take nothing new
    SIGINT    (Ctrl-C) soon; and so is any second signal

Knows sockets, signals and uvicorn; not what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from quire.errors import ConfigError
from quire.peer.address import join_address
from quire.web.config import WebConfig

if TYPE_CHECKING:
    from prometheus_client import Counter

    from quire.web.traced import Tracer


logger = logging.getLogger("quire.web")


def bind(config: WebConfig) -> socket.socket:
    """A socket on the address, not listening yet. Raises ConfigError."""
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"host {config.host!r} is not an address here: {error}") from error
    # "localhost" may be both 127.0.0.1 and ::1: clients expect the first.
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    # The protocol is named because asyncio sets TCP_NODELAY only then. Without it, an answer on a
    # connection that is kept open waits for an ACK, which the client's system delays by 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        fix = "choose another port, or stop what uses this one"
        if error.errno == errno.EADDRNOTAVAIL:
            fix = "give --host an address of this machine, such as 127.0.0.1"
        raise ConfigError(f"cannot listen on {where} ({error.strerror}): {fix}") from error
    return listener


def allow_open_files(count: int) -> None:
    """Where the system lets a process have more than it begins with. Says so if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < count:
        logger.warning(
            "this process may open %d files, and %d would be needed for all connections that it "
            "may have: raise the limit (ulimit -Hn), or allow fewer connections",
            most,
            count,
        )


def url_of(config: WebConfig, listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(config.host, config.host)
    return join_address("http", host, listener.getsockname()[1])


class Server(uvicorn.Server):
    """Signals are ours: uvicorn would end the process before the engine is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def traced(url: str | None, spans: Counter, role: str) -> Iterator[Tracer | None]:
    """Whoever tells of requests, while they are served; nothing of it is loaded if nobody asks.
    Raises ConfigError."""
    if url is None:
        yield None
        return
    from quire.web.traced import Tracer

    def count(outcome: str, number: int) -> None:
        spans.labels(outcome).inc(number)

    tracer = Tracer(url, count, {"quire.role": role})
    try:
        yield tracer
    finally:
        tracer.close()


class Stop:
    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._soon = asyncio.Event()

    @property
    def is_set(self) -> bool:
        return self._told.is_set()

    def set(self, *, soon: bool = False) -> None:
        if soon or self._told.is_set():
            self._soon.set()
        self._told.set()

    async def wait(self) -> None:
        await self._told.wait()

    async def wait_soon(self) -> None:
        """Until nothing is to be waited for any more."""
        await self._soon.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    stop = Stop()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: stop.set(soon=True))
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def finish_first(work: Coroutine[Any, Any, None], timeout_s: float, stop: Stop) -> None:
    """Wait for what runs to finish; but not for ever, nor when it is to be soon."""
    working = asyncio.create_task(work, name="quire-drain")
    hurry = asyncio.create_task(stop.wait_soon())
    try:
        await asyncio.wait({working, hurry}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, hurry):
            task.cancel()
        await asyncio.gather(working, hurry, return_exceptions=True)
