"""swarm(): fresh seeds of both simulators, side by side in processes, until time or steps are up.

    parent ──SwarmRun──▶ process ──what it found, or nothing──▶ parent     one run at a time each

Knows the simulators and processes; neither consoles nor the options of commands. A run that breaks
a rule, ends its process or does not end is a failure with the command that repeats it; the others
go on. Failures are written where they happen (findings.py), before anybody is told.
"""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext

from quire.sim.findings import Findings
from quire.sim.options import SimOptions
from quire.sim.pd.options import SimPdOptions
from quire.sim.report import SimulationError

_LOOK_EVERY_S = 0.5
_MAX_COMPUTED_S = 300.0
"""A run takes seconds: one that computes for so long goes round in circles."""
_MAX_RUN_S = 3600.0
"""However busy the machine is with other things."""


class Simulator(enum.StrEnum):
    RUN = "run"
    PD = "pd"


STEPS = {Simulator.RUN: 1_500, Simulator.PD: 700}
"""Of one run: long enough to fill every tier, short enough to draw other options soon."""


@dataclass(frozen=True, slots=True)
class SwarmRun:
    simulator: Simulator
    seed: int
    steps: int

    @property
    def options(self) -> SimOptions | SimPdOptions:
        kind = SimPdOptions if self.simulator is Simulator.PD else SimOptions
        return kind.for_swarm(self.seed)

    @property
    def name(self) -> str:
        return f"{self.simulator.value}-{self.seed}"

    @property
    def command(self) -> str:
        """What repeats it."""
        return self.options.command(self.seed, self.steps)


@dataclass(frozen=True, slots=True)
class Failure:
    run: SwarmRun
    error: str


@dataclass(slots=True)
class SwarmReport:
    seed: int
    """The first; those after it were run too."""
    jobs: int
    seconds: float = 0.0
    runs: Counter[Simulator] = field(default_factory=Counter)
    steps: Counter[Simulator] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    """Commands of what was under way when it was interrupted."""

    @property
    def steps_per_s(self) -> float:
        return self.steps.total() / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    seed: int
    jobs: int
    findings: Findings
    simulators: tuple[Simulator, ...] = tuple(Simulator)
    seconds: float = float("inf")
    steps: float = float("inf")
    """Of all runs together: no run is begun once they are done, or the time is up."""

    def runs(self) -> Iterator[SwarmRun]:
        """The simulators take turns, each through all seeds from the first on."""
        given = 0
        for seed in range(self.seed, 2**63):
            for simulator in self.simulators:
                if given >= self.steps:
                    return
                given += STEPS[simulator]
                yield SwarmRun(simulator, seed, STEPS[simulator])


def run_here(run: SwarmRun) -> str:
    """What it found; empty: nothing."""
    options = run.options
    try:
        if isinstance(options, SimPdOptions):
            from quire.sim.pd.run import simulate_pd  # the engine, and with it torch

            simulate_pd(run.seed, run.steps, options)
        else:
            from quire.sim.run import simulate

            simulate(run.seed, run.steps, options)
    except SimulationError as error:
        return str(error)
    except Exception:  # before its first step, or after its last
        return f"{traceback.format_exc()}  repeat: {run.command}"
    return ""


def swarm(
    plan: SwarmPlan,
    *,
    look: Callable[[SwarmReport], None] = lambda report: None,
    found: Callable[[Failure], None] = lambda failure: None,
    work: Callable[[SwarmRun], str] = run_here,
) -> SwarmReport:
    """`look` is called every now and then, `found` at each failure. An interruption ends it early.
    `work`: what is done with each run; for tests."""
    report = SwarmReport(plan.seed, plan.jobs)
    context = multiprocessing.get_context("spawn")
    hands = [_Hand(context, plan.findings, work) for _ in range(plan.jobs)]
    runs, began_s = plan.runs(), time.monotonic()

    def give(hand: _Hand) -> None:
        in_time = time.monotonic() - began_s < plan.seconds
        hand.give(next(runs, None) if in_time else None)

    try:
        for hand in hands:
            give(hand)
        while busy := {hand.line: hand for hand in hands if hand.run is not None}:
            ready = {busy[line] for line in wait(list(busy), _LOOK_EVERY_S)}  # type: ignore[index]
            for at, hand in enumerate(hands):
                error = hand.heard() if hand in ready else hand.overdue()
                if error is not None and hand.run is not None:
                    plan.findings.end(hand.run.name, hand.run.command, error)
                    _take_in(report, hand.run, error, found)
                    if not hand.process.is_alive():
                        hands[at] = _Hand(context, plan.findings, work)
                    give(hands[at])
            report.seconds = time.monotonic() - began_s
            look(report)
    except KeyboardInterrupt:
        report.stopped = plan.findings.under_way()
    finally:
        for hand in hands:
            hand.process.kill()
    return report


def _take_in(
    report: SwarmReport, run: SwarmRun, error: str, found: Callable[[Failure], None]
) -> None:
    report.runs[run.simulator] += 1
    report.steps[run.simulator] += run.steps
    if error:
        failure = Failure(run, error)
        report.failures.append(failure)
        found(failure)


class _Hand:
    """A process, and the run that it works at; None: it has nothing to do any more."""

    def __init__(
        self, context: SpawnContext, findings: Findings, work: Callable[[SwarmRun], str]
    ) -> None:
        self.line, there = context.Pipe()
        self.process = context.Process(target=answer, args=(there, findings, work), daemon=True)
        self.process.start()
        there.close()
        self.run: SwarmRun | None = None
        self._given_s = 0.0

    def give(self, run: SwarmRun | None) -> None:
        self.run, self._given_s = run, time.monotonic()
        if run is not None:
            self.line.send(run)

    def heard(self) -> str:
        try:
            error: str = self.line.recv()
            return error
        except (EOFError, ConnectionResetError):
            self.process.join()
            return self._broken(f"its process ended with {self.process.exitcode}")

    def overdue(self) -> str | None:
        if self.run is None or time.monotonic() - self._given_s < _MAX_RUN_S:
            return None
        self.process.kill()
        self.process.join()
        return self._broken(f"it has not ended in {_MAX_RUN_S:g} s")

    def _broken(self, what: str) -> str:
        assert self.run is not None
        return f"{what}\n  repeat: {self.run.command}"


def answer(line: Connection, findings: Findings, work: Callable[[SwarmRun], str]) -> None:
    """A process of the swarm: until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    signal.signal(signal.SIGPROF, _too_long)
    os.environ["OMP_NUM_THREADS"] = "1"  # torch is loaded later; every core has its process
    while True:
        try:
            run: SwarmRun = line.recv()
        except EOFError:
            return
        findings.begin(run.name, run.command)
        signal.setitimer(signal.ITIMER_PROF, _MAX_COMPUTED_S)
        error = work(run)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        findings.end(run.name, run.command, error)
        try:
            line.send(error)
        except BrokenPipeError:
            return


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"it has not ended after {_MAX_COMPUTED_S:g} s of computing")
