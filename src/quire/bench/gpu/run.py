"""`quire bench gpu`: every part that is asked for, each figure beside its floor.

Engines in this process, without a server, on a model of a real shape with random weights. All host
work of a step counts; sockets and HTTP do not.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from quire.bench.gpu import copies, latency, mixed, sets
from quire.bench.gpu.asked import judge
from quire.bench.gpu.drive import Drive
from quire.bench.gpu.plan import Part, Plan
from quire.bench.gpu.rig import Progress, Result, Rig
from quire.errors import QuireError

_ON_ONE_ENGINE: tuple[tuple[Part, Callable[[Rig, Drive], object]], ...] = (
    (Part.DECODE, latency.decode),
    (Part.PREFILL, latency.prompts),
    (Part.MIXED, mixed.measure),
    (Part.COPIES, copies.measure),
    (Part.HITS, latency.hits),
    (Part.CROSSOVER, latency.crossing),
)

INTERRUPTED = "the rest"
"""What could not be measured, if somebody has interrupted it."""


def run(plan: Plan, progress: Progress = lambda what, done, of: None) -> Result:
    """What a part could not measure is under `failed`; interrupted from the keyboard, it gives what
    it has. Raises ConfigError, MemoryBudgetError, EngineError if there is nothing to begin with."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="quire-bench-", dir=plan.store) as stores,
    ):
        rig = Rig(plan, Path(folder), Path(stores), progress)
        result: Result = {"shape": plan.shape, "machine": asdict(rig.machine), "failed": {}}
        try:
            _on_one_engine(rig, result)
            if Part.SETS in plan.parts:
                with _failing(Part.SETS, result):
                    rows = result[Part.SETS.value] = []
                    for row in sets.measure(rig):
                        rows.append(row)
        except KeyboardInterrupt:
            result["failed"][INTERRUPTED] = "interrupted"
        return result | {"asked": judge(result)}


def _on_one_engine(rig: Rig, result: Result) -> None:
    wanted = [(part, act) for part, act in _ON_ONE_ENGINE if part in rig.plan.parts]
    if not wanted:
        return
    with rig.engine() as drive:
        for part, act in wanted:
            with _failing(part, result):
                result[part.value] = act(rig, drive)


@contextlib.contextmanager
def _failing(part: Part, result: Result) -> Iterator[None]:
    """The other parts go on."""
    try:
        yield
    except (QuireError, RuntimeError) as error:
        result["failed"][part.value] = f"{type(error).__name__}: {error}"
