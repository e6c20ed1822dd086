"""serve(): a socket, an engine and a server, from their start to their end.

    bind → start the engine, load the tokenizer → listen → serve → drain → close the engine

The socket is bound first: a port in use is said before a model is loaded for nothing. It ends with
SIGINT or SIGTERM (0), or when the engine is gone (1).

Draining, it still listens: who asks is told to go elsewhere, a router sees why, and what runs, or
is held for another engine, is finished. A second signal, or Ctrl-C, cuts that short.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from quire.engine.client import EngineClient
from quire.engine.config import EngineConfig
from quire.engine.messages import EngineInfo, Handed
from quire.errors import ConfigError
from quire.peer.address import join_address
from quire.progress import Share
from quire.server.api import app_of
from quire.server.config import ServerConfig
from quire.server.metrics import Metrics
from quire.server.notices import watched
from quire.server.recorder import Recorder, cannot_record
from quire.server.service import Service
from quire.server.telling import tell_handover
from quire.text.prompting import Prompting
from quire.web.connections import GuardedConfig
from quire.web.listening import Server, Stop, bind, finish_first, stop_signals, traced, url_of
from quire.web.routes import Enrolment, enrolled

_OnReady = Callable[[str, EngineInfo], None]

_ANSWER_S = 2.0
"""For answers already made to reach their clients, once nothing more is computed."""

logger = logging.getLogger("quire.server")


async def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    on_ready: _OnReady,
    on_progress: Share | None = None,
) -> int:
    """The exit code. Raises ConfigError, EngineError or ModelError when it cannot start."""
    with contextlib.closing(bind(server_config)) as listener, stop_signals() as stop:
        _warn_if_open(server_config)
        if server_config.record is not None and server_config.record.exists():
            raise cannot_record(server_config.record, "it exists")
        metrics = Metrics()
        with traced(server_config.otlp, metrics.spans, engine_config.role) as tracer:
            on_handed = functools.partial(tell_handover, metrics=metrics, tracer=tracer)
            starting = _start(engine_config, server_config, on_progress, on_handed)
            started = await _unless(stop, starting)
            if started is None:
                return 0
            client, prompting = started
            try:
                with _recorder(server_config, client.info) as recorder:
                    service = Service(
                        client,
                        prompting,
                        server_config,
                        metrics,
                        recorder=recorder,
                        tracer=tracer,
                    )
                    return await _serve(service, client, listener, stop, on_ready)
            finally:
                prompting.close()
                await client.close()


@contextlib.contextmanager
def _recorder(config: ServerConfig, info: EngineInfo) -> Iterator[Recorder | None]:
    """Raises ConfigError."""
    if config.record is None:
        yield None
        return
    page_bytes = next((t.page_bytes for t in info.tiers if t.component == "full"), 0)
    recorder = Recorder(
        config.record,
        page_size=info.page_size,
        bytes_per_token=page_bytes // info.page_size,
        max_bytes=config.record_max_bytes,
        now_s=time.monotonic(),
    )
    try:
        yield recorder
    finally:
        recorder.close()


async def _start(
    config: EngineConfig,
    server: ServerConfig,
    on_progress: Share | None,
    on_handed: Callable[[Handed], None],
) -> tuple[EngineClient, Prompting]:
    """The tokenizer is loaded while the engine starts."""
    load = functools.partial(
        Prompting.load,
        config.model,
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        use_defaults=server.use_model_defaults,
    )
    loading = asyncio.create_task(asyncio.to_thread(load))
    try:
        client = await EngineClient.start(config, on_progress=on_progress, on_handed=on_handed)
    except BaseException:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        raise
    try:
        return client, await loading
    except BaseException:
        await client.close()
        raise


async def _serve(
    service: Service,
    client: EngineClient,
    listener: socket.socket,
    stop: Stop,
    on_ready: _OnReady,
) -> int:
    server = Server(GuardedConfig(app_of(service), service.config))
    try:
        listener.listen(server.config.backlog)
    except OSError as error:  # bound by two, and the other one listened first
        raise ConfigError(f"cannot listen: {error.strerror}; choose another port") from error
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="quire-http")
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    gone = asyncio.create_task(client.wait_gone(), name="quire-gone")
    stopping = asyncio.create_task(stop.wait(), name="quire-stop")
    config = service.config
    enrolment = Enrolment(_named(config, listener), client.info.role)
    try:
        on_ready(url_of(config, listener), client.info)
        async with (
            watched(service),
            enrolled(config.routers, enrolment, config.admin_key) as leaving,
        ):
            await asyncio.wait({serving, gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
            leaving.set()
            if gone.done() and not stopping.done():
                logger.error("%s", gone.result())
            code = 0 if stopping.done() else 1
            if stop.is_set:
                await finish_first(service.drain(), config.drain_timeout_s, stop)
            await _drain(service, client, server, serving)
            return code
    finally:
        for task in (gone, stopping, serving):
            task.cancel()
        await asyncio.gather(gone, stopping, serving, return_exceptions=True)


def _named(config: ServerConfig, listener: socket.socket) -> str:
    """Where a router finds the server."""
    return join_address("http", config.host, listener.getsockname()[1])


async def _drain(
    service: Service, client: EngineClient, server: uvicorn.Server, serving: asyncio.Task[None]
) -> None:
    """Stop listening, let requests finish, then tell the rest that it is over."""
    service.draining = client.failure is None  # else it did not stop: it was stopped
    server.should_exit = True
    await asyncio.wait({serving}, timeout=service.config.shutdown_grace_s)
    if not serving.done():
        await client.close()  # every request still there ends with an error of its own
        await asyncio.wait({serving}, timeout=_ANSWER_S)
    if serving.done():
        serving.result()


async def _unless(
    stop: Stop, work: Coroutine[Any, Any, tuple[EngineClient, Prompting]]
) -> tuple[EngineClient, Prompting] | None:
    """`work`'s result, or None if the stop came first."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _warn_if_open(config: ServerConfig) -> None:
    if not (config.api_key or config.tenant_keys or config.is_local):
        logger.warning(
            "listening on %s without an API key: anybody who can reach it can use the model; "
            "set api_key, or listen on 127.0.0.1",
            config.host,
        )
