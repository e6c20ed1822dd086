"""What the lower tiers cost when nothing is ever reused: one server with them, one without.

Every round asks both servers the same new prompt, one after the other, and who goes first
alternates (A B, B A, A B, …), so that what slows the machine down for a while slows both. After
each request the server is left alone until its copies and writes have ended: their CPU time is
counted for the request that caused them, and they do not disturb the other server's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quire.bench.stats import compared, summary
from quire.bench.ttft.adminclient import AdminClient
from quire.bench.ttft.hits import ask

Result = dict[str, Any]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""CPU time is not known more finely."""

WITH, WITHOUT = "tiers_on", "tiers_off"


@dataclass(frozen=True, slots=True)
class ServerSide:
    """One of the two servers."""

    name: str
    client: httpx.AsyncClient
    admin: AdminClient
    model: str
    pid: int


async def measure(
    sides: tuple[ServerSide, ServerSide],
    prompts: Sequence[str],
    output_tokens: int,
    progress: Callable[[int], None],
) -> Result:
    """One round per prompt, the first not counted. Raises EngineError."""
    rounds: list[Result] = []
    for number, prompt in enumerate(prompts):
        order = sides if number % 2 == 0 else sides[::-1]
        samples = {side.name: await _one(side, prompt, output_tokens) for side in order}
        rounds.append({"first": order[0].name, **samples})
        progress(2 * len(rounds))
    return summed_up(rounds[1:])


async def _one(side: ServerSide, prompt: str, output_tokens: int) -> Result:
    before = cpu_seconds(side.pid)
    answer = await ask(side.client, side.model, prompt, output_tokens)
    settled_s = await side.admin.wait_idle()
    return {
        "total_s": answer.total_s,
        "ttft_s": answer.ttft_s,
        "settled_s": settled_s,
        "cpu_s": max(cpu_seconds(side.pid) - before, _TICK_S),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": sum((answer.cached or {}).values()),
        "text": answer.text,
    }


def summed_up(rounds: Sequence[Result]) -> Result:
    def column(side: str, name: str) -> list[float]:
        return [one[side][name] for one in rounds]

    reused = sum(column(WITH, "cached_tokens")) + sum(column(WITHOUT, "cached_tokens"))
    same = sum(one[WITH]["text"] == one[WITHOUT]["text"] for one in rounds)
    return {
        "rounds": len(rounds),
        "ok": same == len(rounds) and reused == 0,
        "same_answer": same,
        "reused_tokens": reused,
        "total_s": compared(rounds, "total_s", WITH, WITHOUT),
        "ttft_s": compared(rounds, "ttft_s", WITH, WITHOUT),
        "cpu_s": compared(rounds, "cpu_s", WITH, WITHOUT),
        "settled_s": summary(column(WITH, "settled_s")),
        "samples": [_without_text(one) for one in rounds],
    }


def _without_text(one: Result) -> Result:
    return {
        name: {key: item for key, item in value.items() if key != "text"}
        if isinstance(value, dict)
        else value
        for name, value in one.items()
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
