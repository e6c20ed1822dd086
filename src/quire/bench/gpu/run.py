"""`quire bench gpu`: every part that is asked for, each figure beside its floor.

Engines in this process, without a server, on a model of a real shape with random weights. All host
work of a step counts; sockets and HTTP do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from quire.bench.gpu import copies, latency, sets
from quire.bench.gpu.drive import Drive
from quire.bench.gpu.plan import Part, Plan
from quire.bench.gpu.rig import Progress, Result, Rig

_ON_ONE_ENGINE: tuple[tuple[Part, Callable[[Rig, Drive], object]], ...] = (
    (Part.DECODE, latency.decode),
    (Part.PREFILL, latency.prompts),
    (Part.COPIES, copies.measure),
    (Part.HITS, latency.hits),
    (Part.CROSSOVER, latency.crossing),
)


def run(plan: Plan, progress: Progress = lambda what, done, of: None) -> Result:
    """Raises ConfigError, MemoryBudgetError, EngineError."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        rig = Rig(plan, Path(folder), progress)
        result: Result = {"shape": plan.shape, "machine": asdict(rig.machine)}
        result |= _on_one_engine(rig)
        if Part.SETS in plan.parts:
            result[Part.SETS.value] = sets.measure(rig)
        return result


def _on_one_engine(rig: Rig) -> Result:
    wanted = [(part, act) for part, act in _ON_ONE_ENGINE if part in rig.plan.parts]
    if not wanted:
        return {}
    with rig.engine() as drive:
        return {part.value: act(rig, drive) for part, act in wanted}
