"""`quire bench gpu`: every part that is asked for, each figure beside its floor.

Engines in this process, without a server, on a model of a real shape with random weights. All host
work of a step counts; sockets and HTTP do not.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from quire.bench import Result
from quire.bench.gpu import copying, mixed, sets, times
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.plan import GpuPart, GpuPlan
from quire.bench.gpu.rig import Rig
from quire.errors import QuireError
from quire.progress import Progress

_ON_ONE_ENGINE: tuple[tuple[GpuPart, Callable[[Rig, Drive], object]], ...] = (
    (GpuPart.DECODE, times.decode),
    (GpuPart.PREFILL, times.prompts),
    (GpuPart.MIXED, mixed.measure),
    (GpuPart.HITS, times.hits),
    (GpuPart.COPIES, copying.measure),
    (GpuPart.CROSSOVER, times.crossing),
)

INTERRUPTED = "the rest"
"""What could not be measured, if somebody has interrupted it."""
NO_TIME = "no time was left for it"

Tell = Callable[[Result], None]
"""Of what there is so far, after each part."""


def run(
    plan: GpuPlan,
    progress: Progress = lambda what, done, of: None,
    tell: Tell = lambda result: None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """What a part could not measure is under `failed`; interrupted from the keyboard, it gives what
    it has. Raises ConfigError, MemoryBudgetError, EngineError if there is nothing to begin with."""
    end_s = math.inf if plan.budget_s is None else clock() + plan.budget_s
    if plan.store is not None:
        plan.store.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="quire-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="quire-bench-", dir=plan.store) as stores,
    ):
        rig = Rig(plan, Path(folder), Path(stores), progress)
        found = _Found(plan, asdict(rig.machine), tell, lambda: clock() < end_s)
        try:
            _on_one_engine(rig, found)
            if GpuPart.SETS in plan.parts:
                with found.measuring(GpuPart.SETS) as is_wanted:
                    if is_wanted:
                        rows = found.result[GpuPart.SETS.value] = []
                        for row in sets.measure(rig):
                            rows.append(row)
        except KeyboardInterrupt:
            found.result["failed"][INTERRUPTED] = "interrupted"
        return found.so_far()


class _Found:
    """What was measured so far."""

    def __init__(
        self, plan: GpuPlan, machine: Result, tell: Tell, has_time: Callable[[], bool]
    ) -> None:
        self.result: Result = {"shape": plan.shape, "machine": machine, "failed": {}, "took_s": {}}
        self._tell = tell
        self._has_time = has_time

    def so_far(self) -> Result:
        took_s = dict(self.result["took_s"])
        return self.result | {"took_s": took_s}

    @contextlib.contextmanager
    def measuring(self, part: GpuPart) -> Iterator[bool]:
        """A part, if there is time for it. If it fails, the others go on."""
        began = time.monotonic()
        is_wanted = self._has_time()
        if not is_wanted:
            self.result["failed"][part.value] = NO_TIME
        try:
            yield is_wanted
        except (QuireError, RuntimeError) as error:
            self.result["failed"][part.value] = f"{type(error).__name__}: {error}"
        self.result["took_s"][part.value] = time.monotonic() - began
        self._tell(self.so_far())


def _on_one_engine(rig: Rig, found: _Found) -> None:
    wanted = [(part, act) for part, act in _ON_ONE_ENGINE if part in rig.plan.parts]
    if not wanted:
        return
    with contextlib.closing(rig), rig.engine() as drive:
        for part, act in wanted:
            with found.measuring(part) as is_wanted:
                if is_wanted:
                    found.result[part.value] = act(rig, drive)
            if part is GpuPart.MIXED:  # the last that has need of them
                rig.close()
