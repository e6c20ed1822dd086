"""`quire sim swarm`: fresh seeds in processes, and what is told of those that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from quire.sim.findings import Findings
from quire.sim.swarm import (
    STEPS,
    Failure,
    Simulator,
    SwarmPlan,
    SwarmReport,
    SwarmRun,
    answer,
    run_here,
    swarm,
)
from unit.cli_support import Ran, command

quire = pytest.fixture(command)
BAD_SEED, DEADLY_SEED = 13, 15


def play(run: SwarmRun) -> str:
    """In a process of the swarm: as if one seed broke a rule, and another its process."""
    if run.seed == DEADLY_SEED:
        os._exit(7)
    return "a rule is broken" if run.seed == BAD_SEED else ""


def plan(folder: Path, **given: Any) -> SwarmPlan:
    return SwarmPlan(**{"seed": 10, "jobs": 2, "findings": Findings(folder), **given})


def test_every_simulator_goes_through_all_seeds_from_the_first_on() -> None:
    runs = list(plan(Path(), seed=5, steps=3 * sum(STEPS.values())).runs())
    for simulator in Simulator:
        mine = [run for run in runs if run.simulator is simulator]
        assert [run.seed for run in mine] == [5, 6, 7]
        assert all(run.steps == STEPS[simulator] for run in mine)


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[Failure] = []
    runs = plan(tmp_path, jobs=3, simulators=(Simulator.PD,), steps=10 * STEPS[Simulator.PD])
    report = swarm(runs, found=told.append, work=play)
    assert report.runs == {Simulator.PD: 10}
    assert report.steps == {Simulator.PD: 10 * STEPS[Simulator.PD]}
    assert {failure.run.seed for failure in report.failures} == {BAD_SEED, DEADLY_SEED}
    assert report.failures == told
    (death,) = [failure for failure in told if failure.run.seed == DEADLY_SEED]
    assert "ended with 7" in death.error
    assert f"repeat: quire sim pd --seed {DEADLY_SEED} --steps 700" in death.error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pd-13.failed", "pd-15.failed"]
    for failure in told:
        text = (tmp_path / f"{failure.run.name}.failed").read_text()
        assert text.startswith(f"{failure.run.command}\n")
        assert failure.error in text


def test_no_run_is_begun_after_the_time_is_up(tmp_path: Path) -> None:
    report = swarm(plan(tmp_path, seconds=0.0), work=play)
    assert not report.runs


def test_what_a_run_found_is_written_though_nobody_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the swarm is killed: the process of a run is alone with what it found."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it is not this process's to ignore
    here, there = Pipe()
    run = SwarmRun(Simulator.RUN, BAD_SEED, 100)
    here.send(run)
    here.close()
    answer(there, Findings(tmp_path), play)
    (found,) = tmp_path.iterdir()
    assert found.name == f"run-{BAD_SEED}.failed"
    assert run.command in found.read_text()


def test_what_was_under_way_at_an_interruption_can_be_repeated(tmp_path: Path) -> None:
    def interrupt(report: SwarmReport) -> None:
        if Findings(tmp_path).under_way():
            raise KeyboardInterrupt

    report = swarm(plan(tmp_path, simulators=(Simulator.RUN,)), look=interrupt, work=never_end)
    assert report.stopped
    assert all(command.startswith("quire sim run --seed 1") for command in report.stopped)
    assert len(list(tmp_path.glob("*.running"))) == len(report.stopped)


def never_end(run: SwarmRun) -> str:
    signal.pause()
    return ""


def test_a_run_that_goes_round_in_circles_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it computes, and not by the clock: others may keep the machine busy."""
    monkeypatch.setattr("quire.sim.swarm._MAX_COMPUTED_S", 0.3)
    here, there = Pipe()
    run = SwarmRun(Simulator.RUN, 4, 10**9)
    here.send(run)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGPROF)]
    here.close()
    try:
        answer(there, Findings(tmp_path), run_here)
    finally:
        for each, handler in zip((signal.SIGINT, signal.SIGPROF), before, strict=True):
            signal.signal(each, handler)
    text = (tmp_path / "run-4.failed").read_text()
    assert "TimeoutError: it has not ended after 0.3 s of computing" in text
    assert f"repeat: {run.command}" in text


def test_what_breaks_before_the_first_step_is_a_failure_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.sim.run.Simulation", None)
    run = SwarmRun(Simulator.RUN, 3, 200)
    assert f"repeat: {run.command}" in run_here(run)


def test_a_broken_rule_comes_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.sim.engine.MAX_LOAD_S", -1.0)
    monkeypatch.setattr("quire.sim.engine.MAX_WAIT_S", -1.0)
    run = SwarmRun(Simulator.RUN, 3, 200)
    assert f"repeat: {run.command}" in run_here(run)


@pytest.mark.parametrize("simulator", Simulator)
def test_the_command_runs_both_simulators(quire: Callable[..., Ran], simulator: Simulator) -> None:
    ran = quire(
        *("sim", "swarm", "--only", simulator, "--steps", 1, "--jobs", 1, "--seed", 4, "--json")
    )
    assert ran.code == 0, ran.err
    assert ran.json["ok"]
    assert ran.json["seed"] == 4
    assert ran.json["steps"] == {simulator.value: STEPS[simulator]}
    assert "seeds from 4 on" in ran.err
