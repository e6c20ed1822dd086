"""`quire bench ttft`: what a hit in each tier saves, and what the tiers cost when nothing hits.

Real server processes on one machine, with a store of their own that is removed afterwards; both
parts in one run, so that their figures are of the same machine at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quire.bench.ttft import hits, overhead
from quire.bench.ttft.adminclient import AdminClient
from quire.bench.ttft.overhead import WITH, WITHOUT, ServerSide
from quire.bench.ttft.prompts import Prompts
from quire.errors import EngineError
from quire.own_server import COMMAND, Child
from quire.progress import Progress
from quire.settings import OPTIONS
from quire.settings.sources import CONFIG_VARIABLE
from quire.sizes import format_bytes

GIB = 1 << 30
CUDA_DEVICE_BYTES = 8 * GIB
"""Of each of two servers that share a GPU, unless told otherwise."""

_WARM_UP_TOKENS = 600

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TtftPlan:
    model: Path
    """A directory as transformers saves it, with tokenizer.json."""
    device: str = "cpu"
    device_bytes: int = GIB
    """Of each server."""
    host_bytes: int = 2 * GIB
    directory: Path | None = None
    """For the store; None: the temporary directory."""
    seed: int = 0
    prompt_tokens: int = 4000
    repeats: int = 5
    """Prompts for the hits; 0 leaves that part out."""
    rounds: int = 20
    """For the overhead; 0 leaves that part out."""
    unique_tokens: int = 1000
    """Of each prompt for the overhead."""
    output_tokens: int = 32
    """Generated after each of them."""


def run(plan: TtftPlan, progress: Progress = lambda what, done, total: None) -> Result:
    """Raises EngineError, ModelError."""
    prompts = Prompts(plan.model, plan.seed)
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=plan.directory) as folder:
        return asyncio.run(_run(plan, prompts, Path(folder), progress))


async def _run(plan: TtftPlan, prompts: Prompts, folder: Path, progress: Progress) -> Result:
    result: Result = {
        "model": plan.model.name,
        "device": plan.device,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
    }
    async with contextlib.AsyncExitStack() as servers:
        on = await servers.enter_async_context(_server(WITH, plan, folder, progress))
        await _warm_up(on, prompts)
        if plan.repeats:
            texts = [prompts.next(plan.prompt_tokens) for _ in range(plan.repeats)]
            total = len(texts) * len(hits.CASES)
            result["hits"] = await hits.measure(
                on.client, on.admin, on.model, texts, lambda done: progress("hits", done, total)
            )
        if plan.rounds:
            off = await servers.enter_async_context(_server(WITHOUT, plan, folder, progress))
            await _warm_up(off, prompts)
            # One more: the first round is not counted.
            texts = [prompts.next(plan.unique_tokens) for _ in range(plan.rounds + 1)]
            result["overhead"] = {
                "prompt_tokens": plan.unique_tokens,
                "output_tokens": plan.output_tokens,
                **await overhead.measure(
                    (on, off),
                    texts,
                    plan.output_tokens,
                    lambda done: progress("cost when nothing is reused", done, 2 * len(texts)),
                ),
            }
    result["ok"] = all(result[part]["ok"] for part in ("hits", "overhead") if part in result)
    return result


@contextlib.asynccontextmanager
async def _server(
    name: str, plan: TtftPlan, folder: Path, progress: Progress
) -> AsyncIterator[ServerSide]:
    arguments = ["--port", "0", "--model", str(plan.model), "--device", plan.device]
    arguments += ["--device-memory", str(plan.device_bytes)]
    if name == WITH:
        store = f"{(folder / 'store').as_uri()}?max={_store_bytes(plan)}"
        arguments += ["--host-memory", str(plan.host_bytes), "--store", store]
    else:
        arguments += ["--host-memory", "0", "--store", "none"]
    called, key = name.replace("_", " "), secrets.token_hex(16)
    progress(f"starting a server, {called}", 0, 1)
    async with started(called, arguments, admin_key=key) as (url, pid):
        progress(f"starting a server, {called}", 1, 1)
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            yield ServerSide(name, client, AdminClient(client, key), model, pid)


@contextlib.asynccontextmanager
async def started(
    name: str, arguments: Sequence[str], *, admin_key: str
) -> AsyncIterator[tuple[str, int]]:
    """A server's URL and its process. The caller's own QUIRE_ options do not reach it: what is
    measured is what the arguments say. Raises EngineError, with what it said last."""
    ours = {option.variable for option in OPTIONS.values()} | {CONFIG_VARIABLE}
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    server = Child(name, lambda name, line: None)
    await server.start([*COMMAND, *arguments], environ | {OPTIONS["admin_key"].variable: admin_key})
    try:
        yield (await server.ready()).url, server.pid
    finally:
        await server.stop()


def _store_bytes(plan: TtftPlan) -> int:
    return max(4 * plan.host_bytes, 4 * GIB)


async def _warm_up(side: ServerSide, prompts: Prompts) -> None:
    """The first requests of a process are slower: buffers, thread pools, lazy imports."""
    for _ in range(2):
        answer = await hits.ask(side.client, side.model, prompts.next(_WARM_UP_TOKENS), 4)
    await side.admin.wait_idle()
    if answer.cached is None:
        raise EngineError(
            "the server does not say where cached tokens came from: is it a Quire server?"
        )


def describe(result: Result) -> str:
    return (
        f"{result['model']} on {result['device']}, L1 {format_bytes(result['device_bytes'])}, "
        f"L2 {format_bytes(result['host_bytes'])}, L3 on disk"
    )
