"""Computing from the front while pages come from the back: simulated, and broken on purpose."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from quire.manager import Lease
from quire.manager.fetches.base import Meeting, MeetingPart, PartState
from quire.manager.fetches.meetings import Meetings
from quire.sim import SimOptions, SimulationError, simulate
from quire.sim.pd.options import SimPdOptions, Topology
from quire.sim.pd.run import simulate_pd
from quire.types import PAGE_ID_BYTES, PageIds

WRONG_BYTES = "uses a wrong page|holds something else"
OPTIONS = SimOptions(
    ranks=2, threshold_pages=1, fault_rate=0.1, stuck_share=0.0, host_pages=12, both=True
)
Patch = pytest.MonkeyPatch


def simulate_many(num_seeds: int, options: SimOptions = OPTIONS) -> Counter[str]:
    counted: Counter[str] = Counter()
    for seed in range(num_seeds):
        counted.update(simulate(seed, 800, options).counters)
    return counted


@pytest.mark.parametrize("strict", [False, True])
def test_pages_come_and_are_overtaken_and_all_is_right_c52(strict: bool) -> None:
    counted = simulate_many(8, replace(OPTIONS, strict=strict))
    assert counted["met_pages"] > 0
    assert counted["overtaken_pages"] > 0


def test_whole_engines_meet_too_c52() -> None:
    counted: Counter[str] = Counter()
    for seed in range(4):
        options = SimPdOptions(
            topology=Topology.PEERS, prefills=0, decodes=1, both=True, strict=True,
            host_pages=16, chunk_pages=1, ahead=bool(seed % 2), slow_share=0.0,
            fault_rate=0.02, evict_rate=0.05,
        )  # fmt: skip
        counted.update(simulate_pd(seed, 600, options).counters)
    assert counted["met_pages"] > 0
    assert counted["finish length"] > 0


def test_a_meeting_before_the_copies_have_ended_is_noticed_c52(monkeypatch: Patch) -> None:
    met = Meetings.met

    def hasty(self: Meetings, lease: Lease, computed: int) -> int | None:
        for part in lease.meeting.parts if lease.meeting is not None else ():
            if part.state is PartState.LOADING:
                part.state = PartState.LOADED
        return met(self, lease, computed)

    monkeypatch.setattr(Meetings, "met", hasty)
    with pytest.raises(SimulationError):
        simulate_many(12)


def test_pages_that_come_to_the_wrong_place_are_noticed_c52(monkeypatch: Patch) -> None:
    pages = Meetings._pages

    def turned(self: Meetings, meeting: Meeting, first: int, last: int) -> PageIds:
        right = pages(self, meeting, first, last)
        return PageIds(right[PAGE_ID_BYTES:] + right[:PAGE_ID_BYTES])

    monkeypatch.setattr(Meetings, "_pages", turned)
    with pytest.raises(SimulationError, match=WRONG_BYTES):
        simulate_many(12)


def test_what_did_not_come_and_is_used_all_the_same_is_noticed_c52(monkeypatch: Patch) -> None:
    def trusting(
        self: Meetings, meeting: Meeting, part: MeetingPart, first: int, last: int
    ) -> None:
        here = part.intake.here[0]
        for page in range(part.first, part.last):
            here.setdefault(page, 0)

    monkeypatch.setattr(Meetings, "_cut", trusting)
    monkeypatch.setattr("quire.manager.CacheManager.check_invariants", lambda self: None)
    with pytest.raises(SimulationError):
        simulate_many(12)
