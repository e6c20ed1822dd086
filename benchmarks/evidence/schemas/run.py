"""Starts an engine, and has it checked and measured. Prints nothing."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.schemas import costs, valid
from quire.engine.client import EngineClient
from quire.engine.config import EngineConfig
from quire.progress import Progress


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    device: str = "cpu"
    asked: valid.Asked = field(default_factory=valid.Asked)
    costs: costs.Plan = field(default_factory=costs.Plan)


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    return asyncio.run(_run(plan, progress))


async def _run(plan: Plan, progress: Progress) -> dict[str, Any]:
    from quire.models import load_tokenizer

    config = EngineConfig(
        model=str(plan.model),
        name="bench",
        device=plan.device,
        device_bytes=1 << 30,
        max_context=2048,
        max_running=plan.asked.together,
        max_waiting=plan.asked.together,
        dtype="bfloat16" if plan.device.startswith("cuda") else "float32",
    )
    engine = await EngineClient.start(config)
    try:
        measured = await costs.measure(engine, plan.costs)
        tokenizer = load_tokenizer(plan.model)
        checked = await valid.check(engine, tokenizer, plan.asked, progress)
    finally:
        await engine.close()
    load = round(os.getloadavg()[0], 1)
    about = {"ok": not checked["wrong"], "device": plan.device, "load_average": load}
    return about | measured | {"random": checked}
