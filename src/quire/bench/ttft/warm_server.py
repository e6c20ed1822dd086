"""WarmServer: a `quire serve` that is started for a measurement, and what benchmarks ask of it.

Its own API and the admin API: flush tiers, wait until idle. Knows no benchmark.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from quire.bench.prose import Prose
from quire.bench.serve.chatting import ChatAnswer, Verdict, stream
from quire.errors import EngineError
from quire.own_server import COMMAND, Child
from quire.progress import Progress
from quire.settings import OPTIONS
from quire.settings.sources import CONFIG_VARIABLE

_POLL_S = 0.05
_WARM_UPS = 2
_WARM_UP_CHARS = 3000


@dataclass(frozen=True, slots=True)
class WarmServer:
    client: httpx.AsyncClient
    key: str
    """For the admin API."""
    model: str
    pid: int
    chars_per_token: float = 4.0
    """Of prose."""

    async def ask(self, prompt: str, max_tokens: int) -> ChatAnswer:
        """Greedy, and of full length. Raises EngineError unless the answer is good."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await stream(self.client, "/v1/completions", body)
        if answer.verdict is not Verdict.GOOD:
            raise EngineError(f"a request went wrong ({answer.verdict.value}): {answer.problem}")
        return answer

    def prompts(self, prose: Prose, count: int, num_tokens: int) -> list[str]:
        """Of about so many tokens each; no two begin alike."""
        num_chars = round(num_tokens * self.chars_per_token)
        return [prose.passage(num_chars) for _ in range(count)]

    async def flush(self, tiers: Sequence[str]) -> None:
        """Raises EngineError."""
        await self._call("POST", "/admin/cache/flush", {"tiers": list(tiers)})

    async def wait_idle(self, timeout_s: float = 120.0) -> float:
        """Until no operation (copy, write, fetch) is in flight and no write is still to come;
        seconds it took. Raises EngineError."""
        start = time.perf_counter()
        while time.perf_counter() - start < timeout_s:
            status = await self._call("GET", "/admin/cache")
            moving = status["operations"] | {"writes to come": status["waiting_writes"]}
            if not any(moving.values()):
                return time.perf_counter() - start
            await asyncio.sleep(_POLL_S)
        raise EngineError(
            f"the server still moves pages after {timeout_s:g} s ({moving}): is the disk very slow?"
        )

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            response = await self.client.request(
                method, path, json=body, headers=headers, timeout=120.0
            )
        except httpx.HTTPError as error:
            raise EngineError(f"{method} {path} failed ({error}): see the server's log") from error
        if response.status_code != httpx.codes.OK:
            raise EngineError(
                f"{method} {path} was answered by {response.status_code}: {response.text[:200]}"
            )
        answer: dict[str, Any] = response.json()
        return answer


@contextlib.asynccontextmanager
async def started(
    name: str,
    arguments: Sequence[str],
    prose: Prose,
    progress: Progress = lambda what, done, total: None,
) -> AsyncIterator[WarmServer]:
    """The caller's own QUIRE_ options do not reach it: what is measured is what the arguments say.
    Raises EngineError, with what it said last."""
    ours = {option.variable for option in OPTIONS.values()} | {CONFIG_VARIABLE}
    environ = {key: value for key, value in os.environ.items() if key not in ours}
    admin_key = secrets.token_hex(16)
    what = f"starting a server, {name}"
    progress(what, 0, 1)
    server = Child(name, lambda name, line: None)
    await server.start([*COMMAND, *arguments], environ | {OPTIONS["admin_key"].variable: admin_key})
    try:
        url = (await server.ready()).url
        progress(what, 1, 1)
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            cold = WarmServer(client, admin_key, model, server.pid)
            yield await warmed_up(cold, prose)
    finally:
        await server.stop()


async def warmed_up(server: WarmServer, prose: Prose) -> WarmServer:
    """The first requests of a process are slower: buffers, thread pools, lazy imports. They also
    tell how many characters a token has. Raises EngineError."""
    for _ in range(_WARM_UPS):
        answer = await server.ask(prose.passage(_WARM_UP_CHARS), 4)
    await server.wait_idle()
    if answer.cached is None or not answer.prompt_tokens:
        raise EngineError(
            "the server does not say where cached tokens came from: is it a Quire server?"
        )
    return replace(server, chars_per_token=_WARM_UP_CHARS / answer.prompt_tokens)
