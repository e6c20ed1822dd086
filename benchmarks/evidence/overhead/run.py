"""What host and store cost when nothing is ever reused: a server with them, and one without.

Every round asks both servers the same new prompt, one after the other, and who goes first
alternates (A B, B A, A B, …), so that what slows the machine down for a while slows both. After
each request the server is left alone until its copies and writes have ended: their CPU time is
counted for the request that caused them, and they do not disturb the other server's.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.cost import summed_up
from quire.bench.prose import Prose
from quire.bench.stats import summary
from quire.bench.ttft.run import ServedTiers
from quire.bench.ttft.warm_server import WarmServer, started
from quire.progress import Progress

Result = dict[str, Any]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""CPU time is not known more finely."""

WITH, WITHOUT = "tiers_on", "tiers_off"


def run(
    tiers: ServedTiers,
    *,
    rounds: int = 20,
    prompt_tokens: int = 1000,
    output_tokens: int = 32,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Raises EngineError."""
    prose, none = Prose(seed), ["--host-memory", "0", "--store", "none"]

    async def measured(folder: Path) -> Result:
        lower = tiers.lower_tiers(folder)
        async with (
            started("tiers on", [*tiers.arguments, *lower], prose, progress) as on,
            started("tiers off", [*tiers.arguments, *none], prose, progress) as off,
        ):
            prompts = on.prompts(prose, rounds + 1, prompt_tokens)  # the first is not counted
            return await measure(
                {WITH: on, WITHOUT: off},
                prompts,
                output_tokens,
                lambda done: progress("cost when nothing is reused", done, 2 * len(prompts)),
            )

    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=tiers.directory) as folder:
        found = asyncio.run(measured(Path(folder)))
    told = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return {**tiers.about(), "overhead": told | found, "ok": found["ok"]}


async def measure(
    sides: Mapping[str, WarmServer],
    prompts: Sequence[str],
    output_tokens: int,
    progress: Callable[[int], None],
) -> Result:
    """`sides`: WITH and WITHOUT. One round per prompt, the first not counted.

    Raises EngineError.
    """
    rounds: list[Result] = []
    for number, prompt in enumerate(prompts):
        order = (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH)
        samples = {name: await _one(sides[name], prompt, output_tokens) for name in order}
        rounds.append({"first": order[0], **samples})
        progress(2 * len(rounds))
    settled = summary([one[WITH]["settled_s"] for one in rounds[1:]])
    return summed_up(rounds[1:], WITH, WITHOUT) | {"settled_s": settled}


async def _one(server: WarmServer, prompt: str, output_tokens: int) -> Result:
    before = cpu_seconds(server.pid)
    answer = await server.ask(prompt, output_tokens)
    settled_s = await server.wait_idle()
    return {
        "total_s": answer.total_s,
        "ttft_s": answer.ttft_s,
        "settled_s": settled_s,
        "cpu_s": max(cpu_seconds(server.pid) - before, _TICK_S),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": sum((answer.cached or {}).values()),
        "answer": answer.text,
    }


def cpu_seconds(session: int) -> float:
    """Used so far by all processes of a session: a server, its engine and the ranks. What processes
    that have ended had used is not in it."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue  # it has just ended
            # The name, in parentheses, may hold anything; after it: state ppid pgrp session ...
            fields = text.rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S
