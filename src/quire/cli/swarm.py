"""`quire sim swarm`: fresh seeds of both simulators side by side, for minutes or many steps."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.output import EXIT_FOUND, AsJson, complain, tell
from quire.sim.findings import Findings
from quire.sim.swarm import Failure, Simulator, SwarmPlan, SwarmReport
from quire.sim.swarm import swarm as run_swarm

_DEFAULT_MINUTES = 1.0
_LINE_EVERY_S = 30.0


def swarm(
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="For so long; 1 if no steps are given.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Until so many steps are done, of all runs together.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one per core.")
    ] = None,
    only: Annotated[Simulator | None, typer.Option(help="One of the simulators.")] = None,
    seed: Annotated[int | None, typer.Option(help="The first; by default nobody knows it.")] = None,
    failures: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Where each is written as it happens; by default a new temporary folder.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Short runs over seeds that nobody has run, with everything drawn from the seed.

    Each failure is written and told at once, with the command that repeats it; the exit code is 1
    then. What is under way when it is stopped is in the same folder.
    """
    if minutes is None and steps is None:
        minutes = _DEFAULT_MINUTES
    plan = SwarmPlan(
        seed=secrets.randbelow(2**32) if seed is None else seed,
        jobs=jobs or len(os.sched_getaffinity(0)),
        findings=Findings(failures or Path(tempfile.mkdtemp(prefix="quire-swarm-"))),
        simulators=tuple(Simulator) if only is None else (only,),
        seconds=float("inf") if minutes is None else 60 * minutes,
        steps=float("inf") if steps is None else steps,
    )
    where = f"failures go to {plan.findings.folder}"
    complain(f"seeds from {plan.seed} on, in {plan.jobs} processes; {where}")
    with _progress(plan) as look:
        report = run_swarm(plan, look=look, found=_tell)
    for command in report.stopped:
        complain(f"was under way: {command}")
    tell(_as_dict(report), _table(report), as_json=as_json)
    if report.failures:
        raise typer.Exit(EXIT_FOUND)


def _tell(failure: Failure) -> None:
    complain(failure.error)


@contextmanager
def _progress(plan: SwarmPlan) -> Iterator[Callable[[SwarmReport], None]]:
    """A bar if a person is looking, a line now and then otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=1.0)
        told_s = 0.0

        def look(report: SwarmReport) -> None:
            nonlocal told_s
            share = max(report.seconds / plan.seconds, report.steps.total() / plan.steps)
            bars.update(task, description=_line(report), completed=min(1.0, share))
            if not console.is_terminal and report.seconds - told_s >= _LINE_EVERY_S:
                told_s = report.seconds
                complain(_line(report))

        yield look


def _line(report: SwarmReport) -> str:
    return (
        f"{report.steps.total():,} steps in {report.runs.total():,} runs, "
        f"{report.steps_per_s:,.0f} steps/s, {len(report.failures)} failures"
    )


def _table(report: SwarmReport) -> Any:
    from rich.table import Table

    found = f"{len(report.failures)} runs broke a rule" if report.failures else "no rule was broken"
    title = f"seeds from {report.seed}: {found}"
    table = Table("simulator", "runs", "steps", "failures", title=title)
    for simulator in report.runs:
        failures = sum(f.run.simulator is simulator for f in report.failures)
        figures = (report.runs[simulator], report.steps[simulator], failures)
        table.add_row(simulator.value, *(f"{figure:,}" for figure in figures))
    return table


def _as_dict(report: SwarmReport) -> dict[str, Any]:
    return {
        "ok": not report.failures,
        "seed": report.seed,
        "jobs": report.jobs,
        "seconds": round(report.seconds, 3),
        "steps_per_s": round(report.steps_per_s, 1),
        "runs": {simulator.value: n for simulator, n in report.runs.items()},
        "steps": {simulator.value: n for simulator, n in report.steps.items()},
        "failures": [
            {
                "simulator": failure.run.simulator.value,
                "seed": failure.run.seed,
                "error": failure.error,
                "repeat": failure.run.command,
            }
            for failure in report.failures
        ],
        "stopped": report.stopped,
    }
