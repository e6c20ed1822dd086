"""`quire bench disagg`: prefill and decode apart, on this machine's processor, with a small model.

Three parts in one run: turns (what a decode-side cache saves in time and, exactly, in bytes), a
store that stalls (does a step ever wait for it?) and many sessions that restore at once.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.disagg import restore, stall, turns
from evidence.disagg.sessions import Plan as Sessions
from quire.engine.config import EngineConfig, Role
from quire.models import describe
from quire.progress import Progress

_GIB = 1 << 30

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. 0 leaves a part out."""

    model: Path
    """A directory as transformers saves it."""
    sessions: int = 3
    turns: int = 3
    tokens: int = 240
    """Of a session's first prompt, in the mean."""
    stall_s: float = 5.0
    stall_rounds: int = 3
    restore_rounds: int = 5
    page_size: int = 16
    threads: int = 1
    """Of each engine's model."""
    memory_bytes: int = _GIB // 4
    """Of each engine's pages, on the device and on the host."""
    seed: int = 0


def run(plan: Plan, progress: Progress = lambda *_: None) -> Result:
    """Raises ModelError, MemoryBudgetError, EngineError."""
    load_before = os.getloadavg()
    result: Result = {"model": plan.model.name, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        if plan.sessions and plan.turns:
            result["turns"] = _turns(plan, Path(folder), progress)
        if plan.stall_rounds:
            result["stall"] = stall.run(
                plan.model,
                Path(folder),
                stall.Plan(
                    stall_s=plan.stall_s,
                    rounds=plan.stall_rounds,
                    page_size=plan.page_size,
                    threads=plan.threads,
                    seed=plan.seed,
                ),
                progress,
            )
        if plan.restore_rounds:
            layout = restore.plan_for("cpu").layout
            result["restore"] = restore.run(
                "cpu", restore.Plan(layout, rounds=plan.restore_rounds), progress
            )
    result["load"] = {"before": list(load_before), "after": list(os.getloadavg())}
    parts = [result[name] for name in ("turns", "stall", "restore") if name in result]
    result["ok"] = bool(parts) and all(part["ok"] for part in parts)
    return result


def _turns(plan: Plan, folder: Path, progress: Progress) -> Result:
    shape = describe(plan.model)
    sessions = Sessions(
        sessions=plan.sessions,
        shortest=plan.tokens * 2 // 3,
        longest=plan.tokens * 4 // 3,
        turns=plan.turns,
        added=plan.tokens // 4,
        answer=8,
        at_once=2,
        vocabulary=shape.vocab_size,
        seed=plan.seed,
    )
    store = f"{(folder / 'turns').as_uri()}?max={_GIB}"

    def config(role: Role) -> EngineConfig:
        peer: dict[str, Any] = {"peer_port": 0, "peer_secret": "only for a benchmark"}
        return EngineConfig(
            model=str(plan.model),
            name="bench",
            page_size=plan.page_size,
            device_bytes=plan.memory_bytes,
            host_bytes=plan.memory_bytes,
            store=store,
            threads=plan.threads,
            role=role,
            **({} if role is Role.UNIFIED else peer),
        )

    progress("turns: starting four engines", 0, 1)
    result = turns.measured(
        config(Role.PREFILL),
        config(Role.DECODE),
        config(Role.UNIFIED),
        sessions,
        lambda _side, done, total: progress("turns", done, total),
    )
    result["ok"] = (
        result["bytes"]["exact"]
        and result["same_answers"] == result["sides"][turns.ON]["requests"]
        and not any(result["sides"][turns.OFF]["cached_tokens"][t] for t in ("device", "host"))
    )
    return result
