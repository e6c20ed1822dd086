"""`quire sim swarm`: fresh seeds in processes, and what is told of those that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from quire.sim.swarm import STEPS, Failure, Piece, Simulator, SwarmPlan, run_piece, swarm
from unit.cli_support import Ran, command

quire = pytest.fixture(command)
BAD_SEED, DEADLY_SEED = 13, 15


def play(line: Connection) -> None:
    """In a process of the swarm: as if one seed broke a rule, and another its process."""
    while True:
        try:
            piece: Piece = line.recv()
        except EOFError:
            return
        if piece.seed == DEADLY_SEED:
            os._exit(7)
        line.send("a rule is broken" if piece.seed == BAD_SEED else "")


def test_every_simulator_goes_through_all_seeds_from_the_first_on() -> None:
    pieces = list(SwarmPlan(seed=5, jobs=1, steps=3 * sum(STEPS.values())).pieces())
    for simulator in Simulator:
        mine = [piece for piece in pieces if piece.simulator is simulator]
        assert [piece.seed for piece in mine] == [5, 6, 7]
        assert all(piece.steps == STEPS[simulator] for piece in mine)


def test_a_failure_is_told_and_the_others_go_on() -> None:
    told: list[Failure] = []
    plan = SwarmPlan(seed=10, jobs=3, simulators=(Simulator.PD,), steps=10 * STEPS[Simulator.PD])
    report = swarm(plan, found=told.append, work=play)
    assert report.runs == {Simulator.PD: 10}
    assert report.steps == {Simulator.PD: 10 * STEPS[Simulator.PD]}
    assert {failure.piece.seed for failure in report.failures} == {BAD_SEED, DEADLY_SEED}
    assert report.failures == told
    (death,) = [failure for failure in told if failure.piece.seed == DEADLY_SEED]
    assert "ended with 7" in death.error
    assert f"repeat: quire sim pd --seed {DEADLY_SEED} --steps 700" in death.error


def test_no_run_is_begun_after_the_time_is_up() -> None:
    report = swarm(SwarmPlan(seed=10, jobs=2, seconds=0.0), work=play)
    assert not report.runs


def test_a_broken_rule_comes_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.sim.engine.MAX_LOAD_S", -1.0)
    monkeypatch.setattr("quire.sim.engine.MAX_WAIT_S", -1.0)
    piece = Piece(Simulator.RUN, 3, 200)
    assert f"repeat: {piece.command}" in run_piece(piece)


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
