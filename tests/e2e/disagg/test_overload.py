"""Four times what the lines between real servers carry, for two minutes: they stay full, nobody is
starved, and all of it is answered.

    clients, router ── Switch ──┬── prefill 1, prefill 2       a network and a line each:
                                └── decode 1, decode 2         KBIT_S, in and out

Networks are namespaces, lines are shaped by `tc`: for both it takes root. What is asked, and what
each would wait if the lines did nothing but carry pages in the order of coming, is known before.
The same with a hundred servers, in simulation: `quire sim overload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from e2e.disagg.fleet import SUBJECT, is_right
from e2e.disagg.netns import Network, Switch, why_no_shaping
from e2e.disagg.servers import Node, Program, Reply, pages_of, question, running
from e2e.exactness.subjects import Prompt
from quire.sim.pd.fair import in_order

KBIT_S = int(os.environ.get("QUIRE_TEST_KBIT_S", "1500"))
SECONDS = float(os.environ.get("QUIRE_TEST_SECONDS", "120"))
"""In which requests come."""
TIMES = 4
NUM_TOKENS = 3
LEAST_TOKENS, MOST_TOKENS = 200, 1700
LEAST_GOODPUT, MOST_UNFAIR = 0.8, 3.0
ADMIN_KEY = "the key of these administrators"
CLIENT_TIMEOUT_S = 3600.0
"""So that a broken test ends."""


@dataclass
class Rig:
    hub: Network
    decodes: list[Node]
    prefills: list[Node]
    router: Program

    def received_bytes(self) -> int:
        found = 0
        for node in self.decodes:
            (page_bytes,) = set(node.page_bytes().values())
            found += node.handover()["received_pages"] * page_bytes
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    if reason := why_no_shaping():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Network())
        switch = Switch(hub)

        def start(name: str, **options: object) -> Node:
            network = stack.enter_context(Network())
            address = switch.join(network, KBIT_S)
            return Node(
                tmp_path / name,
                SUBJECT,
                where=network.inside,
                host=address,
                peer_host=address,
                admin_key=ADMIN_KEY,
                handover_timeout=10,
                **options,
            )

        prefills = [start(f"prefill-{i}", role="prefill") for i in (1, 2)]
        decodes = [start(f"decode-{i}", role="decode") for i in (1, 2)]
        stack.enter_context(running(*prefills, *decodes))
        arguments = [part for node in prefills for part in ("--prefill", node.url)]
        arguments += [part for node in decodes for part in ("--decode", node.url)]
        with hub.inside():
            started = Program(
                tmp_path / "router", "route", "--port", "0", *arguments, admin_key=ADMIN_KEY
            )
        yield Rig(hub, decodes, prefills, stack.enter_context(started))


@dataclass
class Asked:
    prompt: Prompt
    come_s: float
    reply: Reply | None = None
    told_s: float = 0.0


def plan(page_bytes: int) -> list[Asked]:
    """As much as the lines of all decode servers carry TIMES over, spread over all the time."""
    rng = random.Random(4)
    text = SUBJECT.read()
    left = TIMES * SECONDS * 2 * KBIT_S * 125
    asked = []
    while left > 0:
        length = rng.randint(LEAST_TOKENS, MOST_TOKENS)
        prompt = [rng.choice(text) for _ in range(length)]
        left -= pages_of(length) * page_bytes
        asked.append(Asked(prompt, rng.uniform(0.0, SECONDS)))
    return sorted(asked, key=lambda each: each.come_s)


async def ask_all(url: str, asked: list[Asked], began_s: float) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=CLIENT_TIMEOUT_S, limits=limits) as http:

        async def ask(mine: Asked) -> None:
            await asyncio.sleep(began_s + mine.come_s - time.monotonic())
            response = await http.post("/v1/completions", json=question(mine.prompt, NUM_TOKENS))
            mine.told_s = time.monotonic() - began_s
            mine.reply = Reply(response.status_code)
            mine.reply.take_in(response.json())

        await asyncio.gather(*(ask(mine) for mine in asked))


@pytest.mark.long
def test_lines_that_are_offered_four_times_too_much_stay_full_and_all_clears(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    (page_bytes,) = set(rig.decodes[0].page_bytes().values())
    asked = plan(page_bytes)
    began_s, received = time.monotonic(), rig.received_bytes()
    meanwhile: list[tuple[float, int]] = []

    async def watch() -> None:
        await asyncio.sleep(SECONDS)
        found = await asyncio.to_thread(rig.received_bytes)
        meanwhile.append((time.monotonic() - began_s, found - received))

    async def both() -> None:
        await asyncio.gather(ask_all(rig.router.url, asked, began_s), watch())

    with rig.hub.inside():
        asyncio.run(both())
    for node in (*rig.decodes, *rig.prefills):
        node.wait_clean()
    for mine in asked:
        assert mine.reply is not None
        is_right(mine.prompt, mine.reply)

    line_bytes_s = 2 * KBIT_S * 125
    offered = [pages_of(len(mine.prompt)) * page_bytes for mine in asked]
    at_s, came = meanwhile[0]
    whole = rig.received_bytes() - received
    cleared_s = max(mine.told_s for mine in asked)
    fair_s = in_order([(m.come_s, n / line_bytes_s) for m, n in zip(asked, offered, strict=True)])
    waits = [mine.told_s - mine.come_s for mine in asked]
    fair = [end_s - mine.come_s for mine, end_s in zip(asked, fair_s, strict=True)]
    goodput, unfair = came / (at_s * line_bytes_s), max(waits) / max(fair)
    counts = [node.handover() for node in rig.decodes]
    with capsys.disabled():
        print(
            f"\n  {len(asked)} requests, {sum(offered) / 1e6:.1f} MB of pages in {SECONDS:g} s, "
            f"{sum(offered) / SECONDS / line_bytes_s:.2f} × two lines of {KBIT_S} kbit/s; "
            f"load average {os.getloadavg()[0]:.1f}\n"
            f"  goodput {goodput:.1%} of the lines meanwhile, "
            f"{whole / cleared_s / line_bytes_s:.1%} until all was answered: {cleared_s:.0f} s\n"
            f"  received {whole / 1e6:.1f} MB; longest wait {max(waits):.0f} s, "
            f"{unfair:.2f} × the longest in order\n"
            f"  asked again {[c['repairs'] for c in counts]}, local {[c['local'] for c in counts]}"
        )
    assert goodput >= LEAST_GOODPUT
    assert unfair <= MOST_UNFAIR
