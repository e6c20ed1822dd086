"""`quire bench pd`: start the engines, ask, and give what was found, as it is found."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from evidence.pd import bytes as bytes_moved
from evidence.pd import figures, fleet, rounds
from evidence.pd.plan import Plan, side_name
from evidence.pd.rounds import Found
from quire.memory.page_layout import PageLayout
from quire.models import describe
from quire.progress import Progress

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
_COPIES = 4
_TELL_EVERY_S = 5.0

Result = dict[str, Any]
Tell = Callable[[Result], None]


def run(plan: Plan, progress: Progress = lambda *_: None, tell: Tell = lambda _: None) -> Result:
    """`tell` hears what there is, every few seconds. Raises ModelError, EngineError."""
    return asyncio.run(_run(plan, progress, tell))


async def _run(plan: Plan, progress: Progress, tell: Tell) -> Result:
    began = time.monotonic()
    result: Result = {
        "plan": _plain(plan),
        "model": {"layers": describe(plan.model).num_layers, "kv_bytes": fleet.token_bytes(plan)},
        "device": _device_name(plan),
        "load": list(os.getloadavg()),
        "copy_bytes_s": copy_bytes_s(plan.device),
        "rates": {},
        "complete": False,
    }
    progress("bytes", 0, 1)
    result["bytes"] = figures.beside_copy(_bytes(plan), result["copy_bytes_s"])
    engines = await fleet.start(plan, progress)
    try:
        result["started_s"] = time.monotonic() - began
        await rounds.warm_up(engines, plan)
        result["warm_s"] = time.monotonic() - began
        found_rates = await rounds.rates(engines, plan, progress)
        result["rates"] = figures.beside_copy(found_rates, result["copy_bytes_s"])
        tell(result)
        before = {s: await rounds.handover_status(c) for s, c in engines.sides.items()}
        found: Found = {}
        told = _Telling(plan, result, found, tell)
        result["complete"] = await rounds.converse(
            engines, plan, found, tell=told.maybe, progress=progress
        )
        result["handovers"] = {
            side.name: figures.of_handovers(before[side], await rounds.handover_status(client))
            for side, client in engines.sides.items()
            if side.transport is not None
        }
    finally:
        await engines.close()
    _sum_up(plan, result, found)
    result["took_s"] = time.monotonic() - began
    result["load_after"] = list(os.getloadavg())
    result["asked"] = figures.asked_of(plan, result)
    result["ok"] = _is_right(plan, result)
    tell(result)
    return result


class _Telling:
    """What there is, now and then: a run that is cut off has not been for nothing."""

    def __init__(self, plan: Plan, result: Result, found: Found, tell: Tell) -> None:
        self._plan, self._result, self._found, self._tell = plan, result, found, tell
        self._told_s = time.monotonic()

    def maybe(self) -> None:
        if time.monotonic() - self._told_s < _TELL_EVERY_S:
            return
        _sum_up(self._plan, self._result, self._found)
        self._tell(self._result)
        self._told_s = time.monotonic()


def _sum_up(plan: Plan, result: Result, found: Found) -> None:
    result["sides"] = figures.of_sides(found)
    result["compared"] = figures.compared(plan, found)


def _is_right(plan: Plan, result: Result) -> bool:
    """Every byte came by the way that it should; a decode engine without a cache reused nothing."""
    for transport in plan.transports:
        for has_cache in (True, False):
            name = side_name(transport, has_cache=has_cache)
            if set(result["handovers"][name]["received_by"]) - {transport.value}:
                return False
            own = (
                set(sides[name]["cached_tokens"]) & {"device", "host", "store"}
                for sides in result["sides"].values()
            )
            if not has_cache and any(own):
                return False
    return True


def copy_bytes_s(device: str) -> float:
    """One plain copy from pinned host memory to the device; on a CPU, from memory to memory."""
    kind = torch.device(device).type
    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, pin_memory=kind == "cuda")
    target = torch.zeros_like(source, device=device, pin_memory=False)
    best = 0.0
    for _ in range(_COPIES):
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if kind == "cuda":
            torch.cuda.synchronize()
        best = max(best, source.numel() / (time.perf_counter() - began))
    del source, target
    if kind == "cuda":
        torch.cuda.empty_cache()
    return best


def _bytes(plan: Plan) -> Result:
    kind, shape = torch.device(plan.device).type, describe(plan.model)
    layout = PageLayout(
        "full",
        len(shape.full_layers),
        shape.num_kv_heads,
        shape.head_dim,
        fleet.dtype_of(plan),
        plan.page_size,
    )
    most = -(-plan.longest // plan.page_size)
    num_pages = max(1, min(most, 2 * _COPY_BYTES[kind] // layout.page_bytes))
    found = bytes_moved.measure(bytes_moved.Plan(layout, num_pages, plan.device), plan.transports)
    if kind == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _device_name(plan: Plan) -> str:
    is_cuda = torch.device(plan.device).type == "cuda"
    return torch.cuda.get_device_name() if is_cuda else f"{len(os.sched_getaffinity(0))} cores"


def _plain(plan: Plan) -> Result:
    values = dataclasses.asdict(plan)
    values["model"] = plan.model.name
    values["transports"] = [kind.value for kind in plan.transports]
    return values
