"""Simulated runs of the real manager: with faults, repeatable, and able to fail.

A longer run by hand: `quire sim run --seed S --steps N`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.config import PrefetchPolicy, WritePolicy
from quire.eviction import EvictionKind
from quire.manager import CacheManager
from quire.sim import SimOptions, SimulationError, UnitMix, simulate

SEEDS = range(30)
STEPS = 1_000


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Counters and faults that the runs of this module have met, together."""
    return set()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_faults_breaks_no_rule(seed: int, seen: set[str]) -> None:
    report = simulate(seed, STEPS)
    assert report.tally.finished > 0
    assert report.tally.checked_pages > 0
    seen.update(report.counters, (f"fault {name}" for name in report.faults))


def test_the_runs_together_reach_every_path(seen: set[str]) -> None:
    """After the runs above: a simulation that avoids the hard parts proves little."""
    if not seen:
        pytest.skip("needs the runs above")
    expected = {
        "backed_up_pages",
        "loaded_pages",
        "load_failed_pages",
        "written_pages",
        "write_retried_pages",
        "fetched_pages",
        "fetch_missed_pages",
        "duplicate_pages",
        "evicted_device_pages",
        "evicted_host_pages",
        "evicted_spare_pages",
        "overdue_operations",
        "prefetch_declined:worker_lost",
        "prefetch_declined:aborted",
        "prefetch_fetched:exact",
        "prefetch_fetched:evicted",
        "prefetch_fetched:truncated",
        "fault load:fail",
        "fault fetch:corrupt",
        "fault write:lost",
        "fault store:fail",
    }
    assert expected <= seen


def test_the_seeds_cover_every_kind_of_cache() -> None:
    options = [SimOptions.from_seed(seed) for seed in SEEDS]
    assert {o.ranks for o in options} == {1, 2, 3}
    assert {o.write_policy for o in options} == set(WritePolicy)
    assert {o.prefetch_policy for o in options} == set(PrefetchPolicy)
    assert {o.eviction for o in options} == set(EvictionKind)
    assert {o.units for o in options} == set(UnitMix)
    assert {o.lose_rank for o in options} == {False, True}


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    first, second = simulate(4, 600), simulate(4, 600)
    assert first == second


def test_different_seeds_are_different_runs() -> None:
    options = SimOptions()
    assert simulate(1, 200, options).digest != simulate(2, 200, options).digest


def test_a_run_does_not_depend_on_the_hash_seed() -> None:
    """The tree keys children by hash(bytes), which differs between processes."""
    program = "from quire.sim import simulate; print(simulate(7, 600).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


def test_progress_is_reported_up_to_the_last_step() -> None:
    seen: list[int] = []
    simulate(0, 300, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 300


def test_a_failure_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: CacheManager) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(CacheManager, "check_invariants", broken)
    with pytest.raises(SimulationError, match=r"repeat: quire sim run --seed 3 --steps 10$"):
        simulate(3, 10)


def test_the_command_names_exactly_the_options_that_differ_from_the_seeds() -> None:
    from dataclasses import replace

    derived = SimOptions.from_seed(5)
    changed = replace(
        derived, ranks=derived.ranks + 1, eviction=EvictionKind.FIFO, events=not derived.events
    )
    command = changed.command(5, 100)
    switch = "--events" if changed.events else "--no-events"
    assert command.startswith("quire sim run --seed 5 --steps 100 ")
    assert set(command.split()[7:]) == {"--ranks", str(changed.ranks), "--eviction", "fifo", switch}


def test_a_report_has_rows_for_a_table() -> None:
    rows = dict(simulate(0, 50).rows())
    assert rows["steps"] == "50"
