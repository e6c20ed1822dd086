"""Simulated runs of the real manager: with faults, repeatable, and able to fail.

A longer run by hand: `quire sim run --seed S --steps N`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from enum import Enum
from itertools import product

import pytest

from quire.config import PrefetchPolicy, WritePolicy
from quire.eviction import EvictionKind
from quire.manager import CacheManager
from quire.sim import ComponentMix, SimOptions, SimReport, SimulationError, UnitMix, simulate
from unit.cli_support import command

SEEDS = range(42)
STEPS = 1_000
HYBRID = [mix for mix in ComponentMix if mix is not ComponentMix.FULL]
WITH_SNAPSHOTS = [ComponentMix.RECURRENT, ComponentMix.BOTH]


@pytest.fixture(scope="module")
def seen() -> set[str]:
    """Counters and faults that the runs of this module have met, together."""
    return set()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_faults_breaks_no_rule(seed: int, seen: set[str]) -> None:
    report = simulate(seed, STEPS)
    assert report.tally.finished > 0
    assert report.tally.checked_pages > 0
    seen.update(met(report))


def met(report: SimReport) -> set[str]:
    """What a run has met, also as "mix: what"."""
    names = {*report.counters, *(f"fault {name}" for name in report.faults)}
    tally, options = report.tally, report.options
    if tally.restarted:
        names.add("restarted")
    if tally.accepted_tokens and tally.rejected_tokens:
        names |= {"drafts", f"drafts in {options.units.value} units"}
    return names | {f"{options.mix.value}: {name}" for name in names}


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
    in_each_mix = {
        "loaded_pages",
        "fetched_pages",
        "fetch_missed_pages",
        "duplicate_pages",
        "evicted_device_pages",
        "evicted_host_pages",
        "prefetch_fetched:exact",
        "prefetch_fetched:evicted",
        "restarted",
    }
    with_snapshots = {"snapshots", "snapshots_skipped", "snapshots_over_budget"}
    expected |= {f"{mix.value}: {what}" for mix in ComponentMix for what in in_each_mix}
    expected |= {f"{mix.value}: {what}" for mix in WITH_SNAPSHOTS for what in with_snapshots}
    expected |= {f"{mix.value}: prefetch_declined:no_state" for mix in HYBRID}
    expected |= {f"drafts in {units.value} units" for units in UnitMix}
    expected |= {"full: drafts", "window: drafts"}
    assert not expected - seen


CRAMPED = SimOptions(
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    host_pages=12,
    window_pages=2,
    host_windows=10,
    host_slots=6,
    snapshot_every=2,
    snapshots_per_path=8,
    threshold_pages=1,
    concurrency=6,
    slow_share=0.1,
    stuck_share=0.0,
    admin_rate=0.1,
)
"""A host that is always full, and points to go on from everywhere."""


@pytest.mark.parametrize("mix", HYBRID, ids=lambda mix: mix.value)
def test_fetches_of_hybrids_are_cut_or_declined_when_the_host_is_full_c22(
    mix: ComponentMix,
) -> None:
    missing = {
        "prefetch_fetched:truncated",
        "prefetch_declined:host_full",
        "prefetch_declined:no_slot",
    }
    for seed in range(24):
        report = simulate(seed, 1_200, replace(CRAMPED, mix=mix))
        missing -= report.counters.keys()
        if not missing:
            return
    pytest.fail(f"no run has met {missing}")


def test_a_run_does_not_depend_on_where_objects_lie_in_memory() -> None:
    """A set of nodes goes by their addresses: walking through one would not be repeatable."""
    options = replace(CRAMPED, mix=ComponentMix.BOTH)
    occupied: list[object] = []
    first = simulate(8, 1_200, options).counters
    for n in range(2):
        occupied.append([bytearray(16 + 37 * i % 600) for i in range(n, 5_000)])
        assert simulate(8, 1_200, options).counters == first


def test_the_seeds_cover_every_kind_of_cache() -> None:
    options = [SimOptions.from_seed(seed) for seed in SEEDS]
    assert {o.ranks for o in options} == {1, 2, 3}
    assert {o.write_policy for o in options} == set(WritePolicy)
    assert {o.prefetch_policy for o in options} == set(PrefetchPolicy)
    assert {o.eviction for o in options} == set(EvictionKind)
    assert {o.units for o in options} == set(UnitMix)
    assert {o.lose_rank for o in options} == {False, True}
    every: list[tuple[str, Iterable[object]]] = [
        ("ranks", (1, 2, 3)),
        ("write_policy", WritePolicy),
        ("prefetch_policy", PrefetchPolicy),
        ("eviction", EvictionKind),
        ("units", UnitMix),
    ]
    for name, values in every:
        pairs = {(o.mix, getattr(o, name)) for o in options}
        assert pairs == set(product(ComponentMix, values)), name


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
    derived = SimOptions.from_seed(5)
    changed = replace(
        derived, ranks=derived.ranks + 1, eviction=EvictionKind.FIFO, events=not derived.events
    )
    command = changed.command(5, 100)
    switch = "--events" if changed.events else "--no-events"
    assert command.startswith("quire sim run --seed 5 --steps 100 ")
    assert set(command.split()[7:]) == {"--ranks", str(changed.ranks), "--eviction", "fifo", switch}


def test_the_command_repeats_a_run_whose_every_option_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command line too: an option that it lacks could not be repeated."""
    seed, steps = 5, 40
    options = SimOptions.from_seed(seed)
    changed = replace(options, **{f.name: other(getattr(options, f.name)) for f in fields(options)})
    program, *words = shlex.split(changed.command(seed, steps))
    assert program == "quire"
    assert len([word for word in words if word.startswith("--")]) == 2 + len(fields(options))
    report = command(capsys, monkeypatch)(*words, "--json").json
    assert report["digest"] == simulate(seed, steps, changed).digest
    assert report["options"]["mix"] == changed.mix.value


def other(value: object) -> object:
    """Another value of the same kind that makes a cache that works."""
    match value:
        case bool():
            return not value
        case Enum():
            values = list(type(value))
            return values[(values.index(value) + 1) % len(values)]
        case float():
            return value / 2 + 0.001
        case int():
            return value + 1
    raise AssertionError(value)


def test_a_report_has_rows_for_a_table() -> None:
    rows = dict(simulate(0, 50).rows())
    assert rows["steps"] == "50"
