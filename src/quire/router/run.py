"""route(): a socket, a fleet and an app, from their start to their end.

    bind → ask every server once → listen → serve → drain

It starts whether or not the servers are there: it uses those that come. It ends with SIGINT or
SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable

import httpx

from quire.errors import ConfigError
from quire.router.app import app_of
from quire.router.config import RouterConfig
from quire.router.fleet import Fleet
from quire.router.metrics import RouterMetrics
from quire.router.names import Lookup, Names, lookup
from quire.router.proxy import Proxy
from quire.router.upstream import Upstream
from quire.web.config import WebConfig
from quire.web.connections import GuardedConfig
from quire.web.listening import (
    Server,
    Stop,
    allow_open_files,
    bind,
    finish_first,
    stop_signals,
    traced,
    url_of,
)

OnFleetReady = Callable[[str, Fleet], None]

_OTHER_FILES = 256
"""Beside those of streams: whole answers, checks of servers, the program itself."""
_ANSWER_S = 2.0
"""For errors to reach clients, once nothing more is awaited."""


async def route(config: RouterConfig, listen: WebConfig, on_ready: OnFleetReady) -> None:
    """Raises ConfigError when it cannot start."""
    with contextlib.closing(bind(listen)) as listener, stop_signals() as stop:
        await run(config, listen, listener, stop, on_ready)


async def run(
    config: RouterConfig,
    listen: WebConfig,
    listener: socket.socket,
    stop: Stop,
    on_ready: OnFleetReady,
    *,
    look: Lookup = lookup,
) -> None:
    """Until `stop` is set. `look`: names up."""
    metrics = RouterMetrics()
    allow_open_files(_OTHER_FILES + 2 * listen.max_connections)  # a client's, and its server's
    with traced(listen.otlp, metrics.spans, "router") as tracer:
        trust = whom_to_trust()  # takes milliseconds: once, and the same for all
        async with http_client(config, trust) as client:
            upstream = Upstream(client, trust, config.idle_timeout_s)
            proxy = Proxy(Fleet(config, client), upstream, metrics, tracer=tracer)
            names = Names(proxy.fleet, look)
            await proxy.fleet.start()
            await names.start()
            try:
                await _run(proxy, listen, listener, stop, on_ready)
            finally:
                await names.close()
                await proxy.fleet.close()


async def _run(
    proxy: Proxy, listen: WebConfig, listener: socket.socket, stop: Stop, on_ready: OnFleetReady
) -> None:
    listener.listen(1024)
    server = Server(GuardedConfig(app_of(proxy, listen), listen))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="quire-router")
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        on_ready(url_of(listen, listener), proxy.fleet)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set:
            await finish_first(proxy.drain(), listen.drain_timeout_s, stop)
        await _drain(proxy, server, serving, listen.shutdown_grace_s)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def whom_to_trust() -> ssl.SSLContext:
    """Of `https://` servers. Raises ConfigError."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = os.environ.get("SSL_CERT_FILE", "")
        raise ConfigError(
            f"SSL_CERT_FILE is {named!r}, from which no authority can be read "
            f"({error.strerror or error}): name a file of certificates, or leave it unset"
        ) from None


def http_client(config: RouterConfig, trust: ssl.SSLContext) -> httpx.AsyncClient:
    """How long an answer may take is for upstream.py and fleet.py to say; and no proxy of the
    environment stands between the servers of a fleet."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=config.connect_timeout_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        trust_env=False,
        verify=trust,
    )


async def _drain(proxy: Proxy, server: Server, serving: asyncio.Task[None], grace_s: float) -> None:
    """Stop listening, let requests finish, then tell the rest that it is over."""
    server.should_exit = True
    await asyncio.wait({serving}, timeout=grace_s)
    if not serving.done():
        proxy.is_stopped = True
        for member in proxy.fleet.members:
            member.cut()
        await asyncio.wait({serving}, timeout=_ANSWER_S)
