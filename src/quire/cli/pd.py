"""`quire pd`: a prefill server, a decode server and a router on this machine, in one command.

The servers are processes of their own, `quire serve` on free ports, that share a secret nobody else
knows and a store. The router runs here. A server that dies is started again, on its old ports, and
the router uses it as soon as it is back; one that dies again and again ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from quire import logs
from quire.cli import flags
from quire.cli.extras import ROUTE, SERVE, needs
from quire.cli.output import complain, show, start_bar
from quire.cli.serve import check_store, keep_admin_key
from quire.cli.welcome import directions
from quire.errors import EngineError, MemoryBudgetError
from quire.garbage import spare_what_stands
from quire.settings import (
    OPTIONS,
    Machine,
    Settings,
    check,
    effective,
    load,
    make_cache_dir,
    probe,
)
from quire.settings.machine import CUDA_SHARE
from quire.settings.starting import weights_bytes
from quire.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from quire.own_server import Child, ChildReady, Say
    from quire.web.config import WebConfig
    from quire.web.listening import Stop

NAMES = ("prefill", "decode")
logger = logging.getLogger("quire.pd")

_MOST_FAILURES = 3
"""Starts in a row that come to nothing."""
_PAUSE_S = 0.5
"""Before the first of them; then twice as long each time."""

_Tp = Annotated[int, typer.Option(min=1, help="Ranks of that server.")]


@dataclass(frozen=True, slots=True)
class Start:
    """How one server is started."""

    name: str
    arguments: tuple[str, ...]
    environ: dict[str, str]


@flags.taking("model", "device", "device_memory", "host_memory", "store", "port", "otlp")
def pd(
    given: flags.Given,
    prefill_tp: _Tp = 1,
    decode_tp: _Tp = 1,
) -> None:
    """Prefill and decode on separate servers, with a router, all on this machine.

    Memory sizes are each server's; by default what `quire serve` would take is halved.
    """
    needs("serve", SERVE + ROUTE)
    from quire.models import resolve
    from quire.web.config import WebConfig
    from quire.web.keyfile import make_key
    from quire.web.listening import bind

    environ = dict(os.environ) | {OPTIONS["peer_secret"].variable: secrets.token_hex(32)}
    loaded = load(given.texts | {"role": "decode"}, environ)
    machine = probe()
    half = replace(machine, available_bytes=machine.available_bytes // 2)
    settings = effective(loaded.settings, half)
    for warning in check(loaded, settings, half):
        complain(warning)
    if loaded.settings.store is None:
        make_cache_dir(machine)
    logs.configure(logging.WARNING)
    listen = WebConfig(
        host="127.0.0.1", port=settings.port, api_key=settings.api_key, otlp=settings.otlp
    )
    bind(listen).close()  # a port in use is said before anything is started for nothing
    check_store(settings)
    with start_bar() as progress:
        directory = resolve(settings.model, progress)
    admin_key = settings.admin_key or make_key()
    environ[OPTIONS["admin_key"].variable] = admin_key
    starts = plan(settings, machine, directory, (prefill_tp, decode_tp), environ)
    asyncio.run(_run(starts, settings, listen, admin_key))


def plan(
    settings: Settings,
    machine: Machine,
    directory: Path,
    tps: Sequence[int],
    environ: dict[str, str],
) -> list[Start]:
    """How each server is started so that both fit. Raises MemoryBudgetError."""
    assert settings.host_memory is not None
    assert settings.store is not None
    gpus = _visible_gpus(machine, environ) if settings.device == "cuda" else []
    device_bytes = settings.device_memory
    is_shared = len(gpus) < sum(tps)
    if device_bytes is None and is_shared:
        device_bytes = _half_device_bytes(machine, weights_bytes(directory, settings.dtype or ""))
    starts = []
    for name, tp, first in zip(NAMES, tps, (0, tps[0]), strict=True):
        arguments = ["--role", name, "--port", "0", "--host", "127.0.0.1", "--tp", str(tp)]
        arguments += ["--peer-host", "127.0.0.1", "--peer-port", "0"]
        arguments += ["--host-memory", str(settings.host_memory), "--store", settings.store]
        if device_bytes is not None:
            arguments += ["--device-memory", str(device_bytes)]
        for option in ("model", "device", "dtype", "otlp"):
            value = getattr(settings, option)
            if value is not None:
                arguments += [f"--{option}", str(value)]
        own = dict(environ)
        if name == "prefill":  # clients ask the other one
            own.pop(OPTIONS["record"].variable, None)
        if gpus and not is_shared:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + tp])
        if settings.device == "cpu" and settings.threads is None:
            cores = len(os.sched_getaffinity(0))
            own[OPTIONS["threads"].variable] = str(max(cores // (2 * tp), 1))
        starts.append(Start(name, tuple(arguments), own))
    return starts


def _visible_gpus(machine: Machine, environ: dict[str, str]) -> list[str]:
    named = environ.get("CUDA_VISIBLE_DEVICES")
    found = named.split(",") if named else [str(i) for i in range(len(machine.gpus))]
    return found[: len(machine.gpus)]


def _half_device_bytes(machine: Machine, weights: int) -> int:
    """Of GPUs that both servers use, weights twice."""
    free = min(machine.gpus)
    size = int((free - 2 * weights) * CUDA_SHARE / 2)
    if size <= 0:
        raise MemoryBudgetError(
            f"the weights need {format_bytes(2 * weights)} for two servers and "
            f"{format_bytes(free)} are free on the GPU: free some, or use a smaller model"
        )
    return size


async def _run(
    starts: Sequence[Start], settings: Settings, listen: WebConfig, admin_key: str
) -> None:
    """Until it is stopped. Raises EngineError when a server ends before."""
    from quire.own_server import COMMAND, Child
    from quire.web.listening import stop_signals

    with stop_signals() as stop:
        async with contextlib.AsyncExitStack() as running:
            with start_bar() as progress:
                is_starting = True

                def say(name: str, line: str) -> None:
                    if is_starting:
                        progress(f"{name}: {logs.message_of(line)}", 0.5)
                    else:
                        logs.relay(name, line)

                children = []
                for start in starts:
                    child = Child(start.name, say)
                    await child.start([*COMMAND, *start.arguments], start.environ)
                    running.push_async_callback(child.stop)
                    children.append(child)
                ready = await _all_ready(children, stop)
                is_starting = False
            if ready is not None:
                await _route(
                    [_Server(*each) for each in zip(starts, children, ready, strict=True)],
                    settings,
                    listen,
                    stop,
                    admin_key,
                    say=say,
                    running=running,
                )


async def _all_ready(children: Sequence[Child], stop: Stop) -> list[ChildReady] | None:
    """None: it was stopped before. Raises EngineError."""

    async def all_ready() -> list[ChildReady]:
        return await asyncio.gather(*(child.ready() for child in children))

    starting, stopping = asyncio.create_task(all_ready()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


@dataclass(slots=True)
class _Server:
    """One that runs."""

    start: Start
    child: Child
    ready: ChildReady

    def arguments(self) -> list[str]:
        """To start it again where it was."""
        found = list(self.start.arguments)
        ports = {"--port": self.ready.url, "--peer-port": self.ready.info.peer}
        for option, address in ports.items():
            if port := urlsplit(address).port:
                found[found.index(option) + 1] = str(port)
        return found


async def _keep(server: _Server, say: Say, running: contextlib.AsyncExitStack) -> str:
    """Start it again whenever it dies. Returns when that is of no use: why."""
    from quire.own_server import COMMAND, Child

    failures = 0
    while True:
        reason = await server.child.gone()
        if failures >= _MOST_FAILURES:
            return reason
        logger.warning("%s: it is started again", reason)
        await asyncio.sleep(_PAUSE_S * 2**failures)
        server.child = Child(server.start.name, say)
        await server.child.start([*COMMAND, *server.arguments()], server.start.environ)
        running.push_async_callback(server.child.stop)
        failures += 1
        with contextlib.suppress(EngineError):
            await server.child.ready()
            logger.warning("the %s server is back", server.start.name)
            failures = 0


async def _route(
    servers: Sequence[_Server],
    settings: Settings,
    listen: WebConfig,
    stop: Stop,
    admin_key: str,
    *,
    say: Say,
    running: contextlib.AsyncExitStack,
) -> None:
    from quire.router.config import RouterConfig
    from quire.router.fleet import Fleet
    from quire.router.run import run
    from quire.web.listening import bind

    prefill, decode = (server.ready for server in servers)
    config = RouterConfig(prefill=(prefill.url,), decode=(decode.url,), admin_key=admin_key)

    def on_ready(url: str, _: Fleet) -> None:
        spare_what_stands()
        key_file = keep_admin_key(url, admin_key, settings, living)
        show(table(url, servers))
        print(directions(url, decode.info, settings, key_file), flush=True)

    ended: list[str] = []

    async def watch(server: _Server) -> None:
        ended.append(await _keep(server, say, running))
        stop.set(soon=True)

    watching = [asyncio.create_task(watch(server)) for server in servers]
    try:
        with contextlib.ExitStack() as living, contextlib.closing(bind(listen)) as listener:
            await run(config, listen, listener, stop, on_ready)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    if ended:
        raise EngineError(f"{ended[0]}, again and again; all the others were stopped")


def table(url: str, servers: Sequence[_Server]) -> Table:
    """What runs where."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False, title="What runs where")
    for name in ("what", "address", "page server", "process"):
        found.add_column(name, no_wrap=True)
    found.add_column("cache", overflow="fold")
    found.add_row("router", url, "", str(os.getpid()), "")
    for child, each in ((server.child, server.ready) for server in servers):
        sizes = [
            f"{tier.name} {format_bytes(tier.num_pages * tier.page_bytes)}"
            for tier in each.info.tiers
            if tier.component == "full" and tier.num_pages
        ]
        found.add_row(
            child.name,
            each.url,
            each.info.peer,
            str(child.pid),
            "\n".join(sizes),
        )
    return found
