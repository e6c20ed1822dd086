"""More is offered than the lines between engines carry: they stay full, and all of it clears.

A longer run by hand: `quire sim pd --link-pages-s 4 --arrivals 0.06 --steps 20000`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.disagg.giving import Giver
from quire.disagg.receiving import Receiver
from quire.sim import SimulationError
from quire.sim.pd.fair import SessionWait, in_equal_parts, in_order
from quire.sim.pd.options import OverloadOptions, SimPdOptions
from quire.sim.pd.overload import LEAST_GOODPUT, MOST_UNFAIR, overload
from quire.sim.pd.run import PdSimulation

PAGES_S = 4.0


@pytest.mark.parametrize("seed", [5])
def test_lines_that_are_offered_too_much_stay_full_and_nothing_is_starved(seed: int) -> None:
    """Without end to what they carry the engines would exchange more. Pages that have come count,
    not those that were sent twice; and a call that is kept waiting for ever breaks a rule."""
    options = SimPdOptions(
        prefills=2,
        decodes=2,
        device_pages=60,
        host_pages=80,
        link_pages_s=PAGES_S,
        arrivals=0.06,
        restore=False,
    )
    sim = PdSimulation(seed, options)
    for _ in range(1000):
        sim.step()
    began_s, before = sim.clock(), received(sim)
    for _ in range(2000):
        sim.step()
    rate = (received(sim) - before) / (sim.clock() - began_s)
    assert rate >= 0.6 * options.decodes * PAGES_S
    sim.drain()
    assert not sim.clients.calls
    counters = sim.report(seed, 3000).counters
    given_up = sum(counters.get(f"repair {why}", 0) for why in ("silent", "room", "timeout"))
    assert given_up <= 0.1 * counters["received_pages"]


def received(sim: PdSimulation) -> int:
    return sum(node.manager.counters.received_pages for node in sim.nodes)


SMALL = OverloadOptions(
    servers=4,
    sessions=100,
    seconds=60.0,
    most_pages=40,
    host_pages=120,
    timeout_s=6.0,
    turn_s=0.2,
)


@pytest.mark.parametrize("seed", [1, 2])
def test_four_times_what_the_lines_carry_is_carried_at_their_rate_and_in_turn(seed: int) -> None:
    """By default it is a hundred engines: `quire sim overload`."""
    report = overload(seed, SMALL)
    assert report.goodput >= LEAST_GOODPUT
    assert report.unfairness <= MOST_UNFAIR
    assert report.most_unfair.ratio <= MOST_UNFAIR
    assert len(report.waits) == SMALL.sessions  # all clears
    assert report.counters.get("handover local", 0) == 0
    assert report.sent_pages <= 1.1 * report.received_pages


@pytest.mark.parametrize("num_pages", [4, 40])
def test_who_is_alone_in_a_cluster_is_treated_fairly(num_pages: int) -> None:
    """However short its time on the line: what everybody goes through is no starvation."""
    options = replace(SMALL, servers=2, sessions=1, least_pages=num_pages, most_pages=num_pages)
    (wait,) = overload(1, replace(options, times=num_pages / 600)).waits  # of lines of 10 pages/s
    assert 0.5 <= wait.ratio <= 1.5


def test_one_that_is_starved_makes_the_report_say_so() -> None:
    """Also where the longest wait of all is no longer than it may be."""
    fair = SessionWait(seconds=100.0, in_order_s=90.0, line_s=90.0, alone_s=5.0)
    starved = SessionWait(seconds=60.0, in_order_s=1.0, line_s=2.0, alone_s=5.0)
    report = overload(1, SMALL)
    assert replace(report, waits=[fair] * 9).holds
    unfair = replace(report, waits=[*[fair] * 9, starved])
    assert unfair.unfairness <= MOST_UNFAIR
    assert not unfair.holds


def test_who_is_not_told_to_wait_asks_elsewhere_and_that_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What keeps the lines from collapsing, taken away."""
    monkeypatch.setattr(Giver, "_reassure", lambda *_: None)
    monkeypatch.setattr(Receiver, "_note_progress", lambda *_: None)
    with pytest.raises(SimulationError):
        overload(1, SMALL)


def test_in_order_each_waits_for_those_before_it() -> None:
    assert in_order([(0.0, 2.0), (1.0, 3.0), (10.0, 1.0)]) == [2.0, 5.0, 11.0]


def test_in_equal_parts_a_small_one_is_through_before_a_large_one_that_came_first() -> None:
    assert in_equal_parts([(0.0, 4.0), (1.0, 1.0), (10.0, 1.0)]) == [5.0, 3.0, 11.0]
