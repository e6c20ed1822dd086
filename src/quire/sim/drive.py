"""drive(): a seeded run from its first step to its report, or to the first rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from quire.progress import Ticks
from quire.sim.report import SimulationError

_PROGRESS_EVERY = 256

Report_co = TypeVar("Report_co", covariant=True)


class Drivable(Protocol[Report_co]):
    def clock(self) -> float: ...

    def drain(self) -> None:
        """Let everything end that was begun."""

    def report(self, seed: int, steps: int) -> Report_co: ...


class Repeatable(Protocol):
    def command(self, seed: int, steps: int) -> str:
        """What repeats the run."""


def drive(
    run: Drivable[Report_co],
    options: Repeatable,
    *,
    seed: int,
    steps: int,
    step: Callable[[int], None],
    progress: Ticks | None,
) -> Report_co:
    """`step(n)` does the n-th. Raises SimulationError with the command that repeats the run."""
    at = 0
    try:
        for at in range(steps):
            step(at)
            if progress is not None and at % _PROGRESS_EVERY == 0:
                progress(at)
        run.drain()
    except Exception as error:
        # Whatever broke, an assertion of what is simulated included, is a finding to be repeated.
        where = f"step {at} of {steps}, virtual time {run.clock():.3f} s"
        again = options.command(seed, steps)
        raise SimulationError(
            f"{type(error).__name__}: {error}\n  {where}\n  repeat: {again}"
        ) from error
    if progress is not None:
        progress(steps)
    return run.report(seed, steps)
