"""Copies between device and host: how much of the link they use, and what decoding feels of them;
and what the tiers cost when nothing is ever reused.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import msgspec

from quire.bench import Result
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.rig import Rig
from quire.bench.gpu.times import GREEDY, longest
from quire.bench.link import BOTH, CopyWay, Link, PageOrder
from quire.memory.page_layout import PageLayout
from quire.transfer import Copy
from quire.types import Tier

_WAYS = {"load": (CopyWay.LOAD,), "backup": (CopyWay.BACKUP,), "both": BOTH}
_IN_FLIGHT = 2
"""Copies of a direction, when the link is to be full."""
_TIMES_PER_STEP = 2
"""The pool of an engine without tiers holds so many times what its requests need."""


def measure(rig: Rig, drive: Drive) -> Result:
    return {
        "link": link(rig),
        "beside": beside(rig, drive),
        "fresh": fresh(rig, drive),
    }


def link(rig: Rig) -> list[Result]:
    """Per page size, way and order: bytes a second, and as a share of plain copies."""
    rows = []
    for i, page_size in enumerate(rig.plan.copy_pages):
        rig.progress("copies", i, len(rig.plan.copy_pages))
        with closing(Link(_layout(rig, page_size), rig.plan.copy_bytes, rig.device)) as one:
            for name, ways in _WAYS.items():
                for order in PageOrder:
                    ours, plain = one.shares(ways, order)
                    rows.append(
                        {
                            "page_size": page_size,
                            "way": name,
                            "order": order.value,
                            "bytes_s": ours,
                            "plain_bytes_s": plain,
                            "share": ours / plain,
                            "how": one.how,
                        }
                    )
    return rows


def beside(rig: Rig, drive: Drive) -> list[Result]:
    """Decoding alone, and while copies fill the link."""
    plan, rows = rig.plan, []
    with closing(Link(_layout(rig, plan.page_size), plan.copy_bytes, rig.device)) as busy:
        for i, (batch, context) in enumerate(plan.beside):
            rig.progress("decoding beside copies", i, len(plan.beside))
            prompts = [rig.prompt(context) for _ in range(batch)]
            row: Result = {"batch": batch, "context": context, "how": busy.how}
            with drive.decoding(prompts, longest(GREEDY, drive, context)) as decoding:
                alone = [decoding.gap_ms(plan.decode_tokens)]
                for name, ways in _WAYS.items():
                    with _saturated(busy, ways) as rate:
                        row[f"{name}_ms"] = decoding.gap_ms(plan.decode_tokens)
                        row[f"{name}_bytes_s"] = rate()
                    alone.append(decoding.gap_ms(plan.decode_tokens))
                    # The context grows meanwhile: what it takes alone is that before and after.
                    row[f"{name}_slower"] = row[f"{name}_ms"] / statistics.mean(alone[-2:]) - 1
            row["alone_ms"] = statistics.mean(alone)
            rows.append(row)
            drive.forget(Tier.DEVICE, Tier.HOST)
    return rows


@contextmanager
def _saturated(link: Link, ways: Sequence[CopyWay]) -> Iterator[Callable[[], float]]:
    """Copies, scattered, one behind the other, as long as this lasts. What comes says how many
    bytes a second went over the link until now."""
    over = threading.Event()
    moved = dict.fromkeys(ways, 0)

    def keep(way: CopyWay) -> None:
        copies: deque[Copy] = deque()
        while not over.is_set():
            copies.append(link.start(way, PageOrder.SCATTERED))
            if len(copies) > _IN_FLIGHT:
                copies.popleft().wait()
                moved[way] += link.size_bytes
        for copy in copies:
            copy.wait()

    threads = [threading.Thread(target=keep, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    try:
        yield lambda: sum(moved.values()) / (time.perf_counter() - began)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def fresh(rig: Rig, drive: Drive) -> list[Result]:
    """Tokens a second of requests that have nothing in common, with the tiers and without."""
    plan = rig.plan
    batch, prompt, answer = plan.fresh
    pages = batch * -(-(prompt + answer) // plan.page_size)
    pool_bytes = _TIMES_PER_STEP * pages * plan.page_size * rig.needs.kv_bytes
    with rig.engine(device_bytes=pool_bytes, host_bytes=0) as without:
        rows = [_versus(rig, "host", drive, without)]
        rig.attach(drive)
        rows.append(_versus(rig, "host and store", drive, without))
    rig.detach(drive)
    return rows


def _versus(rig: Rig, name: str, tiers: Drive, without: Drive) -> Result:
    rates: dict[str, list[float]] = {"tiers": [], "without": []}
    for i in range(rig.plan.fresh_rounds + 1):
        rig.progress(f"nothing reused, {name}", i, rig.plan.fresh_rounds + 1)
        for which, drive in (("tiers", tiers), ("without", without)):
            rates[which].append(_tokens_s(rig, drive))
            drive.forget(Tier.DEVICE, Tier.HOST)
    with_s, without_s = (statistics.median(rates[which][1:]) for which in ("tiers", "without"))
    return {
        "tiers": name,
        "tokens_s": with_s,
        "off_tokens_s": without_s,
        "share": with_s / without_s,
    }


def _tokens_s(rig: Rig, drive: Drive) -> float:
    batch, prompt, answer = rig.plan.fresh
    params = msgspec.structs.replace(GREEDY, max_tokens=answer)
    heard = drive.answer_all([rig.prompt(prompt) for _ in range(batch)], params)
    seconds = max(one.times_s[-1] for one in heard) - min(one.asked_s for one in heard)
    return batch * (prompt + answer) / seconds


def _layout(rig: Rig, page_size: int) -> PageLayout:
    spec = rig.spec
    return PageLayout(
        "full", spec.num_layers, spec.num_kv_heads, spec.head_dim, "bfloat16", page_size
    )
