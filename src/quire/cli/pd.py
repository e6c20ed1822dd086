"""`quire pd`: a prefill server, a decode server and a router on this machine, in one command.

The servers are processes of their own, `quire serve` on free ports, that share a secret nobody else
knows and a store. The router runs here. They all end together, whoever ends first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire import logs
from quire.cli import flags
from quire.cli.extras import ROUTE, SERVE, needs
from quire.cli.output import complain, show, start_bar
from quire.cli.serve import check_store, keep_admin_key
from quire.cli.welcome import directions
from quire.errors import EngineError, MemoryBudgetError
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
from quire.settings.engine import weights_bytes
from quire.settings.machine import CUDA_SHARE
from quire.sizes import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from quire.cli.children import Child, Ready
    from quire.server.config import ServerConfig
    from quire.server.stopping import Stop

NAMES = ("prefill", "decode")
COMMAND = (sys.executable, "-m", "quire.cli", "serve", "--child")

_Tp = Annotated[int, typer.Option(min=1, help="Ranks of that server.")]


@dataclass(frozen=True, slots=True)
class Start:
    """How one server is started."""

    name: str
    arguments: tuple[str, ...]
    environ: dict[str, str]


def pd(
    model: flags.Model = None,
    device: flags.Device = None,
    device_memory: flags.DeviceMemory = None,
    host_memory: flags.HostMemory = None,
    store: flags.Store = None,
    port: flags.Port = None,
    prefill_tp: _Tp = 1,
    decode_tp: _Tp = 1,
) -> None:
    """Prefill and decode on separate servers, with a router, all on this machine.

    Memory sizes are each server's; by default what `quire serve` would take is halved.
    """
    needs("serve", SERVE + ROUTE)
    from quire.models import resolve
    from quire.server.config import ServerConfig
    from quire.server.keyfile import make_key
    from quire.server.run import bind

    environ = dict(os.environ) | {OPTIONS["peer_secret"].variable: secrets.token_hex(32)}
    given = {
        "model": model,
        "device": device,
        "device_memory": device_memory,
        "host_memory": host_memory,
        "store": flags.joined(store),
        "port": port,
        "role": "decode",
    }
    loaded = load(given, environ)
    machine = probe()
    half = replace(machine, available_bytes=machine.available_bytes // 2)
    settings = effective(loaded.settings, half)
    for warning in check(loaded, settings, half):
        complain(warning)
    if loaded.settings.store is None:
        make_cache_dir(machine)
    logs.configure(logging.WARNING)
    listen = ServerConfig(host="127.0.0.1", port=settings.port, api_key=settings.api_key)
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
        for option in ("model", "device", "dtype"):
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
    starts: Sequence[Start], settings: Settings, listen: ServerConfig, admin_key: str
) -> None:
    """Until it is stopped. Raises EngineError when a server ends before."""
    from quire.cli.children import Child
    from quire.server.stopping import stop_signals

    with stop_signals() as stop:
        async with contextlib.AsyncExitStack() as running:
            with start_bar() as progress:
                is_starting = True

                def say(name: str, line: str) -> None:
                    if is_starting:
                        progress(f"{name}: {logs.message_of(line)}", 0.5)
                    else:
                        complain(f"[{name}] {logs.message_of(line)}")

                children = []
                for start in starts:
                    child = Child(start.name, say)
                    await child.start([*COMMAND, *start.arguments], start.environ)
                    running.push_async_callback(child.stop)
                    children.append(child)
                ready = await _all_ready(children, stop)
                is_starting = False
            if ready is not None:
                await _route(children, ready, settings, listen, stop, admin_key)


async def _all_ready(children: Sequence[Child], stop: Stop) -> list[Ready] | None:
    """None: it was stopped before. Raises EngineError."""

    async def all_ready() -> list[Ready]:
        return await asyncio.gather(*(child.ready() for child in children))

    starting, stopping = asyncio.create_task(all_ready()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)


async def _route(
    children: Sequence[Child],
    ready: Sequence[Ready],
    settings: Settings,
    listen: ServerConfig,
    stop: Stop,
    admin_key: str,
) -> None:
    from quire.router.config import RouterConfig
    from quire.router.fleet import Fleet
    from quire.router.run import run
    from quire.server.run import bind

    prefill, decode = ready
    config = RouterConfig(prefill=(prefill.url,), decode=(decode.url,), admin_key=admin_key)

    def on_ready(url: str, _: Fleet) -> None:
        key_file = keep_admin_key(url, admin_key, settings, living)
        show(table(url, children, ready))
        print(directions(url, decode.info, settings, key_file), flush=True)

    ended: list[str] = []

    async def watch(child: Child) -> None:
        ended.append(await child.gone())
        stop.set(soon=True)

    watching = [asyncio.create_task(watch(child)) for child in children]
    try:
        with contextlib.ExitStack() as living, contextlib.closing(bind(listen)) as listener:
            await run(config, listen, listener, stop, on_ready)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    if ended:
        raise EngineError(f"{ended[0]}; all the others were stopped: start them again")


def table(url: str, children: Sequence[Child], ready: Sequence[Ready]) -> Table:
    """What runs where."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False, title="What runs where")
    for name in ("what", "address", "page server", "process"):
        found.add_column(name, no_wrap=True)
    found.add_column("cache", overflow="fold")
    found.add_row("router", url, "", str(os.getpid()), "")
    for child, each in zip(children, ready, strict=True):
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
