"""Multi-turn sessions on a decode engine with its cache and without, and on a unified engine.

All engines are processes, alive at the same time and asked in turn: round by round each side gets
the same turn of its own copy of every session, in an order that rotates, while the others rest.
Every side has a salt of its own, so that none finds at the prefill engine what another left there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from evidence.disagg.sessions import Plan, Session, sessions
from quire.bench.stats import percentile, ratio, summary
from quire.engine.client import EngineClient
from quire.engine.config import EngineConfig
from quire.engine.messages import CachedTokens, EngineStatus, GetStatus, SamplingParams
from quire.progress import Progress

ON, OFF, UNIFIED = "cache_on", "cache_off", "unified"
SIDES = (ON, OFF, UNIFIED)
_REST_S = 60.0
_NEWS_S = 0.6
"""Ranks in other processes report their counters twice a second."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One turn of one session."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached: CachedTokens
    answer: list[int]
    turn: int


@dataclass(slots=True)
class Fleet:
    prefill: EngineClient
    sides: dict[str, EngineClient]

    async def close(self) -> None:
        for client in (*self.sides.values(), self.prefill):
            await client.close()


async def start(prefill: EngineConfig, decode: EngineConfig, unified: EngineConfig) -> Fleet:
    """`decode`: with its cache; the same without it is started beside it."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(config: EngineConfig) -> EngineClient:
            client = await EngineClient.start(config)
            stack.push_async_callback(client.close)
            return client

        first = await one(prefill)
        peers = [first.info.peer]
        on = await one(_changed(decode, prefill=peers))
        off = await one(_changed(decode, prefill=peers, decode_cache=False, store=None))
        alone = await one(unified)
        stack.pop_all()
        return Fleet(first, {ON: on, OFF: off, UNIFIED: alone})


def _changed(config: EngineConfig, **changes: Any) -> EngineConfig:
    return msgspec.structs.replace(config, **changes)


async def run(fleet: Fleet, plan: Plan, progress: Progress = lambda *_: None) -> dict[str, Any]:
    await _warm_up(fleet, plan)
    copies = {side: sessions(plan) for side in SIDES}
    asked: dict[str, list[Asked]] = {side: [] for side in SIDES}
    received = dict.fromkeys(SIDES, 0)
    for turn in range(plan.turns):
        for i in range(len(SIDES)):
            side = SIDES[(turn + i) % len(SIDES)]
            progress(side, turn * len(SIDES) + i, plan.turns * len(SIDES))
            client = fleet.sides[side]
            before = await _received(client)
            answers = await _round(client, copies[side], plan, side, turn)
            asked[side] += answers
            for session, answer in zip(copies[side], answers, strict=True):
                session.grow(answer.answer, turn)
            await at_rest((fleet.prefill, *fleet.sides.values()))
            received[side] += await _received(client) - before
    page_size = fleet.sides[ON].info.page_size
    sides = {side: _figures(asked[side], received[side], page_size) for side in SIDES}
    pairs = zip(asked[ON], asked[OFF], strict=True)
    return {
        "plan": dataclasses.asdict(plan),
        "page_size": page_size,
        "sides": sides,
        "compared": {
            f"{ON}/{other}": {
                "later_turns": _compared(_later(asked[ON]), _later(asked[other])),
                "all_turns": _compared(asked[ON], asked[other]),
            }
            for other in (OFF, UNIFIED)
        },
        "bytes": compared_bytes(sides[ON], sides[OFF]),
        "same_answers": sum(ours.answer == theirs.answer for ours, theirs in pairs),
    }


def compared_bytes(on: dict[str, Any], off: dict[str, Any]) -> dict[str, Any]:
    """What a decode engine received with its cache and without: less by the share of the pages
    that it had itself, exactly.

    Without a cache every page of every prompt comes from the prefill engine, so that a page's
    share of the bytes is known without asking anybody what a page weighs.
    """
    expected, rest = divmod(off["received_bytes"] * (on["pages"] - on["own_pages"]), on["pages"])
    return {
        "on": on["received_bytes"],
        "off": off["received_bytes"],
        "reused_share": on["own_pages"] / on["pages"],
        "saved_share": 1 - on["received_bytes"] / max(1, off["received_bytes"]),
        "expected": expected,
        "exact": rest == 0 and on["received_bytes"] == expected and on["pages"] == off["pages"],
    }


async def _round(
    client: EngineClient, copies: list[Session], plan: Plan, salt: str, turn: int = 0
) -> list[Asked]:
    gate = asyncio.Semaphore(plan.at_once)

    async def one(session: Session) -> Asked:
        async with gate:
            return await ask(client, session.tokens.tobytes(), plan.answer, salt, turn)

    return await asyncio.gather(*(one(session) for session in copies))


async def ask(
    client: EngineClient,
    tokens: bytes,
    count: int,
    salt: str,
    turn: int,
    *,
    prefill: Sequence[str] = (),
) -> Asked:
    """One request, of which `count` tokens come. Raises RuntimeError if none do."""
    params = SamplingParams(max_tokens=count, temperature=0.0)
    times: list[float] = []
    answer: list[int] = []
    cached = CachedTokens()
    began = time.perf_counter()
    async with client.generate(tokens, params, salt=salt, prefill=prefill) as outputs:
        async for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
            cached = output.cached or cached
            times += [time.perf_counter()] * len(output.tokens)
            answer += output.tokens
    tpot_s = (times[-1] - times[0]) / max(1, len(times) - 1)
    return Asked(times[0] - began, tpot_s, len(tokens) // 4, cached, answer, turn)


async def _warm_up(fleet: Fleet, plan: Plan) -> None:
    """Kernels are loaded and memory is taken before anything is measured."""
    short = dataclasses.replace(plan, sessions=2, turns=1, seed=plan.seed + 1)
    for side in SIDES:
        await _round(fleet.sides[side], sessions(short), short, salt=f"warm-{side}")
        await at_rest((fleet.prefill, *fleet.sides.values()))


async def at_rest(clients: Sequence[EngineClient]) -> None:
    """Until nobody moves a byte: what one side left undone must not disturb the next."""
    deadline = time.monotonic() + _REST_S
    while time.monotonic() < deadline:
        statuses = [await client.ask(GetStatus(), EngineStatus) for client in clients]
        if not any(
            sum(s.operations.values()) + s.waiting_writes + s.running + s.waiting for s in statuses
        ):
            return
        await asyncio.sleep(0.05)


async def _received(client: EngineClient) -> int:
    await asyncio.sleep(_NEWS_S)
    status = await client.ask(GetStatus(), EngineStatus)
    return status.handover.received_bytes if status.handover is not None else 0


def _figures(asked: list[Asked], received: int, page_size: int) -> dict[str, Any]:
    tokens = {
        name: sum(getattr(a.cached, name) for a in asked) for name in CachedTokens.__struct_fields__
    }
    own = tokens["device"] + tokens["host"] + tokens["store"]
    return {
        "requests": len(asked),
        "ttft_s": summary([a.ttft_s for a in asked]),
        "ttft_later_s": summary([a.ttft_s for a in _later(asked)]),
        "tpot_s": summary([a.tpot_s for a in asked]),
        "received_bytes": received,
        "prompt_tokens": sum(a.prompt_tokens for a in asked),
        "pages": sum((a.prompt_tokens - 1) // page_size for a in asked),
        "own_pages": own // page_size,
        "cached_tokens": tokens,
    }


def _later(asked: list[Asked]) -> list[Asked]:
    """All but first turns, of which no side has anything."""
    return [one for one in asked if one.turn > 0]


def _compared(ours: list[Asked], theirs: list[Asked]) -> dict[str, Any]:
    first, second = [a.ttft_s for a in ours], [a.ttft_s for a in theirs]
    return {
        "ttft_mean": sum(first) / sum(second),
        "ttft_p99": percentile(first, 0.99) / percentile(second, 0.99),
        "ttft": ratio(first, second),
        "tpot": ratio([a.tpot_s for a in ours], [a.tpot_s for a in theirs]),
    }


def measured(
    prefill: EngineConfig,
    decode: EngineConfig,
    unified: EngineConfig,
    plan: Plan,
    progress: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Start the engines, run the plan, end them."""

    async def whole() -> dict[str, Any]:
        fleet = await start(prefill, decode, unified)
        try:
            return await run(fleet, plan, progress)
        finally:
            await fleet.close()

    return asyncio.run(whole())
