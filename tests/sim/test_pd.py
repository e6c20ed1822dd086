"""Simulated clusters of real engines: prefill, decode, peers, a store and lines, with faults.

A longer run by hand: `quire sim pd --seed S --steps N`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from quire.sim import ComponentMix, SimulationError, UnitMix
from quire.sim.pd.options import SimPdOptions, Topology
from quire.sim.pd.run import simulate_pd
from sim.test_simulation import other
from unit.cli_support import Ran, command

SEEDS = range(28)
STEPS = 800
"""28 · 800 = 22,400 turns of engines."""


FOUND = {
    8000604: "a peer that had less than was asked for said nothing at all",
    8020144: "the same",
    8020261: "a window with a hole was kept behind a prefix that had grown",
    8030434: "an Abort overtook its Ask, which was then held for nobody",
    8060525: "the same",
}
"""Seeds that broke a rule once, with what was wrong."""
FOUND_BY_SWARM = {
    5010: "who waited for room held what those who had it needed",
    6071: "the same",
    6082: "the same",
    77000083: "what a hand-over had yielded meanwhile was waited for, and asked for by nobody",
    79000282: "a page that came twice was forgotten once",
    990000025: "what came hung below what the device alone had, for one that had yielded that",
    31000246: "more was on its way than the link moves in the time of one",
    2984898281: "pages were fetched again that others brought, behind some that nobody did",
    1207047763: "more than the link moves, and cancelled reads filled the link for ever",
    745834848: "a step launched behind one whose load had failed was taken for a wrong page",
    745835056: "the same",
    830242151: "hand-overs that moved together had no room for the state at their ends",
}
"""The same, with what runs out drawn as the swarm does."""
FOUND_WITH_PAIRS = {
    544582077: "a prompt that was all there was computed from within its last page, for a peer",
    544582075: "the same",
}
"""The same, with pairs and drafts."""
AS_IT_WAS: dict[str, Any] = {"units": UnitMix.TOKEN, "drafts": 0}
"""When these were found."""


quire = pytest.fixture(command)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What the runs of this module have met, together."""
    return Counter()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_with_faults_breaks_no_rule(seed: int, seen: Counter[str]) -> None:
    report = simulate_pd(seed, STEPS)
    assert report.counters["finish length"] > 0
    assert report.counters["checked pages"] > 0
    seen.update(report.counters)
    options = report.options
    for kind in (options.mix.value, f"{options.units.value} units"):
        seen.update({f"{kind}: {k}": n for k, n in report.counters.items()})


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once_stays_right(seed: int) -> None:
    options = replace(SimPdOptions.from_seed(seed), **AS_IT_WAS)
    assert simulate_pd(seed, 700, options).counters["finish length"] > 0


@pytest.mark.parametrize("seed", FOUND_WITH_PAIRS)
def test_what_a_swarm_found_with_pairs_stays_right(seed: int) -> None:
    assert simulate_pd(seed, 700, SimPdOptions.for_swarm(seed)).counters["finish length"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", FOUND_BY_SWARM)
def test_what_a_swarm_found_once_stays_right(seed: int) -> None:
    options = replace(SimPdOptions.for_swarm(seed), **AS_IT_WAS)
    report = simulate_pd(seed, 700, options)
    assert report.counters["finish length"] > 0


def test_the_runs_together_reach_every_path(seen: Counter[str]) -> None:
    """After the runs above: a simulation that avoids the hard parts proves little."""
    if not seen:
        pytest.skip("needs the runs above")
    repairs = ("miss", "corrupt", "failed", "timeout", "restore", "link", "silent", "refused")
    expected = {f"repair {reason}" for reason in repairs}
    expected |= {f"aborted while {s}" for s in ("looking", "queued", "moving", "running")}
    messages = ("Ask", "Offer", "Complete", "Repair", "Done", "Abort")
    expected |= {f"network duplicated:{name}" for name in messages}
    expected |= {
        "handover all local",
        "handover of both halves",
        "handover failed over",
        "peers received",
        "handover local",
        "finish timeout",
        "finished after a failure",
        "lost with its engine",
        "killed prefill",
        "killed decode",
        "killed unified",
        "network cut",
        "network stalled",
        "network overtook",
        "intake_waits",
        "forgotten",
        "fault serve:fail",
        "fault load:fail",
        "fetched_pages",
        "fetch_missed_pages",
        "load_declined_pages",
        "scheduler requests_restarted",
        "full: accepted tokens",
        "full: rejected tokens",
        "window: accepted tokens",
        "window: rejected tokens",
        "overdue_operations",
    }
    in_each_mix = {"handover received", "handover of both halves", "handover all local", "served"}
    expected |= {f"{mix.value}: {what}" for mix in ComponentMix for what in in_each_mix}
    with_each_unit = {"received_pages", "fetched_pages", "accepted tokens", "rejected tokens"}
    expected |= {f"{mix.value} units: {what}" for mix in UnitMix for what in with_each_unit}
    assert not {what for what in expected if not seen[what]}


CALM = SimPdOptions(
    prefills=2,
    decodes=2,
    device_pages=48,
    host_pages=120,
    host_windows=80,
    host_slots=40,
    abort_rate=0.02,
    duplicated=0.1,
    forget_rate=0.02,
)
"""Nothing goes wrong but what must not be noticed."""


@pytest.mark.parametrize("mix", ComponentMix, ids=lambda mix: mix.value)
def test_without_trouble_nobody_is_refused_or_given_up(mix: ComponentMix) -> None:
    counters = simulate_pd(7, 600, replace(CALM, mix=mix)).counters
    assert "handover local" not in counters
    reasons = ("silent", "link", "refused", "repairs", "room", "copies")
    given_up = {f"repair {reason}" for reason in reasons}
    assert not given_up & counters.keys()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_pages_fit_whatever_the_number_of_ranks(prefill: int, decode: int) -> None:
    options = replace(
        CALM, mix=ComponentMix.BOTH, prefill_ranks=prefill, decode_ranks=decode, fault_rate=0.05
    )
    assert simulate_pd(3, 400, options).counters["received_pages"] > 0


def test_unified_engines_use_each_others_pages() -> None:
    options = replace(CALM, topology=Topology.PEERS, decodes=3)
    counters = simulate_pd(5, 600, options).counters
    assert counters["peers received"] > 0
    assert "handover ready" not in counters


def test_a_prompt_that_is_all_here_costs_no_page() -> None:
    """One conversation after the other, and nothing is lost: often nobody is asked. With a store
    somebody is asked before it answers, and has then granted some pages that nobody reads."""
    options = replace(CALM, concurrency=1, abort_rate=0.0, forget_rate=0.0)
    counters = simulate_pd(2, 1_500, options).counters
    assert counters["handover all local"] > 0
    assert counters["received_pages"] < counters["exported_pages"]
    counters = simulate_pd(2, 1_500, replace(options, restore=False)).counters
    assert counters["handover all local"] > 0
    assert counters["received_pages"] == counters["exported_pages"]


@pytest.mark.parametrize("seed", [2, 4, 13])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first, second = simulate_pd(seed, 300), simulate_pd(seed, 300)
    assert first == second
    assert first.digest != simulate_pd(seed + 1, 300).digest


def test_a_finding_says_how_to_repeat_it() -> None:
    options = replace(
        SimPdOptions.from_seed(6), kill_rate=0.5, host_pages=33, restore=False, patience_s=0.0
    )
    with pytest.raises(SimulationError, match="repeat: quire sim pd --seed 6 --steps 50") as caught:
        simulate_pd(6, 50, options)
    words = shlex.split(str(caught.value).rsplit("repeat: ", 1)[1])
    assert "--host-pages" in words
    assert "--kill-rate" in words


def test_the_command_repeats_a_run_whose_every_option_differs(quire: Callable[..., Ran]) -> None:
    """Through the command line too: an option that it lacks could not be repeated."""
    seed, steps = 5, 40
    options = SimPdOptions.from_seed(seed)
    changed = replace(options, **{f.name: other(getattr(options, f.name)) for f in fields(options)})
    program, *words = shlex.split(changed.command(seed, steps))
    assert program == "quire"
    assert len([word for word in words if word.startswith("--")]) == 2 + len(fields(options))
    report = quire(*words, "--json").json
    assert report["digest"] == simulate_pd(seed, steps, changed).digest
    assert report["options"]["mix"] == changed.mix.value


def test_the_command_runs_and_repeats_itself(quire: Callable[..., Ran]) -> None:
    once, again = (quire("sim", "pd", "--seed", 3, "--steps", 60, "--json") for _ in range(2))
    assert once.code == again.code == 0, once.err
    assert once.json["ok"]
    assert once.json == again.json
    peers = quire("sim", "pd", "--seed", 3, "--steps", 60, "--topology", "peers", "--decodes", 2)
    assert "no rule was broken" in peers.out
