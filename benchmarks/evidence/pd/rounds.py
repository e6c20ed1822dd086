"""Rounds of `quire bench pd`: every side gets the same turn of its own copy of each conversation.

Sides are asked in turn, in an order that rotates, while the others rest. Each has a salt of its
own, so that none finds at the prefill engine what another left there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evidence.disagg.sessions import Plan as Wave
from evidence.disagg.sessions import Session, sessions
from evidence.disagg.turns import Asked, ask, at_rest
from evidence.pd.fleet import Fleet
from evidence.pd.plan import Plan, Side
from quire.engine.client import EngineClient
from quire.engine.messages import EngineStatus, GetStatus, HandoverStatus
from quire.progress import Progress

_NEWS_S = 0.6
"""Ranks in other processes report their counters twice a second."""

Clock = Callable[[], float]


@dataclass(slots=True)
class Heard:
    """What one side has answered to conversations that grow by so many tokens, in the order of
    asking: pairs of sides have the same turn at the same place."""

    asked: list[Asked] = field(default_factory=list)


Found = dict[int, dict[Side, Heard]]
"""By new tokens of a turn."""


async def converse(
    fleet: Fleet,
    plan: Plan,
    found: Found,
    *,
    tell: Callable[[], None],
    progress: Progress,
    clock: Clock = time.monotonic,
) -> bool:
    """Into `found`, which is told of after every round. False: the time was up before the end."""
    began, complete = clock(), True
    for number, added in enumerate(plan.added):
        found[added] = {side: Heard() for side in fleet.sides}
        share = (number + 1) / len(plan.added)
        until = None if plan.limit_s is None else began + plan.limit_s * share
        waves = list(plan.waves(added))
        total = sum(wave.turns for wave in waves)
        done = 0
        for index, wave in enumerate(waves):
            copies = {side: sessions(wave) for side in fleet.sides}
            for turn in range(wave.turns):
                if until is not None and clock() >= until:
                    complete = False
                    break
                progress(f"{added} new tokens", done, total)
                for side in _in_turn(fleet, turn):
                    salt = f"{side.name} {added} {index}"
                    answers = await ask_all(fleet, side, copies[side], wave, salt=salt, turn=turn)
                    found[added][side].asked += answers
                    for session, answer in zip(copies[side], answers, strict=True):
                        session.grow(answer.answer, turn)
                    await at_rest(fleet.clients)
                done += 1
                tell()
    return complete


def _in_turn(fleet: Fleet, turn: int) -> list[Side]:
    order = list(fleet.sides)
    first = turn % len(order)
    return order[first:] + order[:first]


async def ask_all(
    fleet: Fleet, side: Side, copies: Iterable[Session], wave: Wave, *, salt: str, turn: int
) -> list[Asked]:
    """So many at once as the wave says."""
    gate = asyncio.Semaphore(wave.at_once)
    prefill = fleet.page_servers if side.transport is not None else ()

    async def one(session: Session) -> Asked:
        async with gate:
            tokens = session.tokens.tobytes()
            return await ask(fleet.sides[side], tokens, wave.answer, salt, turn, prefill=prefill)

    return await asyncio.gather(*(one(session) for session in copies))


async def warm_up(fleet: Fleet, plan: Plan) -> None:
    """Kernels are loaded, memory is taken and peers are connected before anything is measured."""
    wave = next(plan.waves(plan.added[0]))
    for side in fleet.sides:
        copies = sessions(wave)[: plan.at_once]
        await ask_all(fleet, side, copies, wave, salt=f"warm {side.name}", turn=0)
        await at_rest(fleet.clients)


async def rates(fleet: Fleet, plan: Plan, progress: Progress) -> dict[str, Any]:
    """Of decode engines without a cache: one prompt, which the prefill engine has, as often as is
    said, one after the other. Seconds until the first token, and bytes that came."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(plan.seed)
    count = plan.longest - plan.page_size
    tokens = rng.integers(3, plan.vocabulary, count).astype("<i4").tobytes()
    for side, client in fleet.sides.items():
        if side.transport is None or side.has_cache or not plan.bytes_repeats:
            continue
        salt = f"rates {side.name}"
        await ask(client, tokens, 1, salt, 0, prefill=fleet.page_servers)  # it is computed
        await at_rest(fleet.clients)
        before = await received(client)
        seconds = []
        for number in range(plan.bytes_repeats):
            progress(f"bytes: {side.transport.value}", number, plan.bytes_repeats)
            asked = await ask(client, tokens, 1, salt, 0, prefill=fleet.page_servers)
            seconds.append(asked.ttft_s)
            await at_rest(fleet.clients)
        each = (await received(client) - before) / plan.bytes_repeats
        found[side.transport.value] = {
            "bytes": each,
            "seconds": seconds,
            "bytes_s": each / min(seconds),
        }
    return found


async def handover_status(client: EngineClient) -> HandoverStatus:
    await asyncio.sleep(_NEWS_S)
    status = await client.ask(GetStatus(), EngineStatus)
    return status.handover or HandoverStatus()


async def received(client: EngineClient) -> int:
    return (await handover_status(client)).received_bytes
