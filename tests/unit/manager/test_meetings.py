"""Meetings: pages come from the back while the front is computed. Whatever becomes of them, every
page of the request holds what it must, and nobody writes where another does (C52)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from quire.keys import PrefixKey
from quire.manager import Lease, LoadState, Way
from quire.manager.costs import CostModel
from quire.manager.fetches.base import Meeting as Record
from quire.manager.fetches.meetings import Meetings
from quire.messages import Backup, Completion, Fetch, Load, Probed
from quire.types import DEVICE, PageStatus, Tier, num_pages, page_array, split_keys
from support import Rig

PAGES = 40


@dataclass
class Meeting:
    """A request that computes while pages come, and what its device pages hold by now."""

    rig: Rig
    lease: Lease
    computed: int = 0
    holds: dict[int, int] = field(default_factory=dict)
    """Device page → page of the prompt."""
    hosts: dict[int, int] = field(default_factory=dict)
    """Host page → page of the prompt."""

    def compute(self, most: int = PAGES) -> bool:
        """Up to so many pages. False: it may not, for now."""
        lease, manager = self.lease, self.rig.manager
        met = manager.meetings.met(lease, self.computed)
        if met is not None:
            self.computed = met
        front = PAGES
        if lease.meeting is not None:
            front = manager.meetings.front(lease, self.computed, is_computed=True)
        last = min(front, self.computed + most)
        if last == self.computed:
            return met is not None
        if lease.meeting is not None:
            manager.meetings.computing(lease, last)
        mine = page_array(lease.pages).tolist()[self.computed : last]
        assert len(mine) == last - self.computed
        copied = [c for c in self.rig.pending if isinstance(c, Load)]
        written = {page for load in copied for page in page_array(load.device).tolist()}
        assert not written & set(mine), "two write one page"
        self.holds.update(zip(mine, range(self.computed, last), strict=True))
        self.computed = last
        manager.commit(lease, lease.key[:last] if lease.meeting is None else key(self.rig)[:last])
        return True

    def moved(self, command: Fetch | Load) -> None:
        """All of it has come."""
        places = page_array(command.host).tolist()
        if isinstance(command, Load):
            pages = [self.hosts[host] for host in places]
            self.holds.update(zip(page_array(command.device).tolist(), pages, strict=True))
        else:
            names = split_keys(key(self.rig).page_keys(0, PAGES))
            pages = [names.index(name) for name in split_keys(command.keys)]
            self.hosts.update(zip(places, pages, strict=True))

    def check(self) -> None:
        """The first `computed` pages of its table hold what they must."""
        table = page_array(self.lease.pages).tolist()[: self.computed]
        assert [self.holds.get(page) for page in table] == list(range(self.computed))

    def finish(self) -> None:
        rig = self.rig
        rig.manager.release(self.lease)
        rig.run()
        rig.now += 100.0
        rig.run()
        assert rig.inflight_pages == 0
        for tier in Tier:
            rig.manager.flush(tier)
        for allocator in rig.manager._core.allocators:
            assert allocator.num_free == allocator.num_pages


def key(rig: Rig) -> PrefixKey:
    return rig.doc(PAGES, seed=1)


def meeting(
    ranks: int = 1,
    host: int = 64,
    page_s: tuple[float, float] | None = None,
    pace: float = 1.0,
    **prefetch: object,
) -> Meeting:
    """`page_s`: what it is believed to take to fetch a page, and to compute one. `pace`: what the
    worker says of the store that has them."""
    knows = {"cost_model": page_s is not None}
    rig = Rig(device=3 * PAGES, host=host, ranks=ranks, prefetch=knows | prefetch)
    rig.cache_in_store(key(rig))
    rig.manager.costs.force(Way.BOTH)
    if page_s is not None:
        rig.manager.costs.observe_fetch(1, page_s[0])
        rig.manager.costs.observe_prefill(rig.manager.config.page_size, page_s[1])
    lease = rig.acquire(key(rig))
    rig.manager.prefetch(lease, can_meet=True)
    while not rig.manager.ready(lease):
        commands, rig.pending = rig.pending, []
        reports = [report for command in commands for report in rig.reports(command)]
        rig.step([paced(report, pace) for report in reports])
    rig.manager.admit(lease)
    assert lease.num_device == 0
    assert rig.manager.extend(lease, PAGES)
    assert rig.manager.meetings.start(lease, PAGES)
    return Meeting(rig, lease)


def paced(report: Completion, pace: float) -> Completion:
    if not isinstance(report, Probed):
        return report
    return msgspec.structs.replace(report, paces=[pace] * len(report.hits))


def bring(at: Meeting, kind: type) -> None:
    """Answer all pending fetches, or loads, well."""
    rig = at.rig
    if kind is Load:
        rig.step()
    for command in [c for c in rig.pending if isinstance(c, kind)]:
        rig.pending.remove(command)
        at.moved(command)
        rig.answer(command)


def test_parts_come_from_the_end_on_and_enter_the_tree_behind_what_was_computed_c52() -> None:
    at = meeting()
    rig, lease = at.rig, at.lease
    seen: list[int] = []
    while lease.meeting is not None:
        names = split_keys(key(rig).page_keys(0, PAGES))
        for fetch in [c for c in rig.pending if isinstance(c, Fetch)]:
            seen += [names.index(name) for name in reversed(split_keys(fetch.keys))]
        rig.step()
        bring(at, Fetch)
        assert rig.manager.match(key(rig)).num_pages <= at.computed, "shared before its front"
        bring(at, Load)
        at.compute(2)
    assert seen == sorted(seen, reverse=True)
    assert at.computed == PAGES
    at.check()
    rig.manager.commit(lease, key(rig))
    assert rig.manager.match(key(rig)).num_device == PAGES
    counters = rig.manager.counters
    assert counters.met_pages + counters.committed_pages == PAGES
    assert counters.met_pages > PAGES // 3
    at.finish()


def test_a_copy_of_the_same_pages_that_is_on_its_way_leaves_them_where_they_are_c52() -> None:
    """Another request has fetched the rest to the host, and loads it just when they meet."""
    at = meeting()
    rig, lease = at.rig, at.lease
    rig.step()
    bring(at, Fetch)
    bring(at, Load)
    while at.computed < (front := lease.meeting.low if lease.meeting else 0):
        assert at.compute(front - at.computed)
        rig.step()
    rig.manager.costs.force(Way.FETCH)
    other = rig.acquire(key(rig))
    assert other.num_device == at.computed
    rig.manager.prefetch(other)
    while not rig.manager.ready(other):
        bring(at, Fetch)
        rest = [c for c in rig.pending if not isinstance(c, Fetch | Load | Backup)]
        rig.pending = [c for c in rig.pending if c not in rest]
        rig.step([report for command in rest for report in rig.reports(command)])
    bring(at, Fetch)
    bring(at, Load)
    rig.manager.admit(other)
    assert rig.manager.load(other) > 0
    while lease.meeting is not None:
        assert at.compute()
    assert lease.num_device < at.computed
    assert num_pages(lease.pages) == PAGES
    at.check()
    rig.manager.release(other)
    rig.run()
    rig.manager.commit(lease, key(rig))
    at.finish()


def test_what_is_late_is_computed_in_few_batches_c52() -> None:
    """A batch costs much whatever is in it: part by part took longer than computing it all."""
    at = meeting(page_s=(1.0, 1.0))
    manager, lease = at.rig.manager, at.lease
    at.compute()
    assert lease.meeting is not None
    late = lease.meeting.high - lease.meeting.low
    assert late >= 4 * lease.meeting.part_pages
    for _ in range(2):
        manager.costs.observe_fetch(1, 9.0)
    at.compute()
    assert manager.counters.overtaken_pages >= 0.75 * late
    for _ in range(9):
        bring(at, Fetch)
        bring(at, Load)
        at.compute()
    assert at.computed == PAGES
    at.check()
    at.finish()


def test_what_will_be_there_soon_is_waited_for_c52() -> None:
    """Rather than computed in a batch of its own; but not for ever."""
    at = meeting(page_s=(1.0, 1.0))
    rig, lease = at.rig, at.lease
    at.compute()
    rig.step()
    fetches = [c for c in rig.pending if isinstance(c, Fetch)]
    for command in fetches[:-1]:  # from the back on: the front one is late
        rig.pending.remove(command)
        at.moved(command)
        rig.answer(command)
    assert lease.meeting is not None
    assert len(lease.meeting.late) == 1
    assert not at.compute()
    assert rig.manager.counters.overtaken_pages == 0
    rig.now += 4.0
    assert at.compute()
    assert rig.manager.counters.overtaken_pages > 0
    bring(at, Load)
    at.compute()
    at.compute()
    assert at.computed == PAGES
    at.check()
    at.finish()


def test_what_the_slower_of_two_stores_has_is_reckoned_at_its_rate_c52() -> None:
    """No more of it is asked for than that one brings before it is computed."""
    known, slow = meeting(page_s=(1.0, 1.0)), meeting(page_s=(1.0, 1.0), pace=3.0)
    asked: list[int] = []
    for at in (known, slow):
        at.rig.step()
        fetches = [command for command in at.rig.pending if isinstance(command, Fetch)]
        asked.append(sum(len(split_keys(fetch.keys)) for fetch in fetches))
        at.finish()
    # Of PAGES, half come as fast as the others are computed; and at a third of that rate a quarter.
    assert asked[0] == pytest.approx(PAGES / 2, abs=2)
    assert asked[1] == pytest.approx(PAGES / 4, abs=2)


def test_a_meeting_with_a_slower_store_does_not_count_against_meetings_c52() -> None:
    """It took as long as it had to: the next one, with the fast store, is chosen as before."""
    costs = CostModel(enabled=True, page_size=16)
    costs.observe_fetch(1, 1.0)
    costs.observe_prefill(16, 1.0)
    reckoned_s = costs.meeting_s(32, 0, 3.0)
    assert reckoned_s is not None
    costs.observe_meeting(reckoned_s, 32 * 3 / 4)
    assert costs.choose(32) is Way.BOTH


def release_while_copied_into() -> None:
    """A request ends while pages are copied to its device: these are nobody's before that ends."""
    at = meeting()
    at.rig.step()
    bring(at, Fetch)
    at.rig.step()
    loads = [c for c in at.rig.pending if isinstance(c, Load)]
    num_written = sum(num_pages(load.device) for load in loads)
    assert num_written
    at.rig.manager.release(at.lease)
    at.rig.step()
    assert at.rig.free(Tier.DEVICE) <= 3 * PAGES - num_written, "freed while copied into"
    for load in loads:
        at.rig.pending.remove(load)
        at.rig.answer(load)
    at.rig.run()
    at.rig.manager.flush(Tier.DEVICE)
    assert at.rig.free(Tier.DEVICE) == 3 * PAGES


def test_pages_that_are_copied_into_are_not_free_before_the_copy_has_ended_c52() -> None:
    release_while_copied_into()


def test_pages_freed_while_they_are_copied_into_are_noticed_c52(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eager(self: Meetings, meeting: Record) -> None:
        if self._open.pop(meeting, meeting) is None:
            self._core.allocators[DEVICE].free(meeting.back)

    monkeypatch.setattr(Meetings, "_free_if_unused", eager)
    with pytest.raises(AssertionError, match="freed while copied into"):
        release_while_copied_into()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_becomes_of_the_parts_every_page_holds_what_it_must_c52(seed: int) -> None:
    """Parts arrive in any order, damaged, too late, or never; and there is little room."""
    rng = random.Random(seed)
    at = meeting(ranks=1 + seed % 2, host=rng.choice((6, 12, 64)))
    rig, lease = at.rig, at.lease
    abort_after = rng.randrange(60) if seed % 4 == 0 else 1_000
    for _ in range(abort_after):
        if lease.meeting is None or lease.load_state is LoadState.FAILED:
            break
        rig.step()
        commands = [c for c in rig.pending if isinstance(c, Fetch | Load)]
        if commands and rng.random() < 0.6:
            command = rng.choice(commands)
            rig.pending.remove(command)
            statuses = [0] * num_pages(command.host)
            if rng.random() < 0.1:
                statuses[rng.randrange(len(statuses))] = PageStatus.CORRUPT
            if isinstance(command, Fetch) or not any(statuses):
                at.moved(command)
            rig.answer(command, statuses=statuses)
        elif rng.random() < 0.05:
            rig.now += 20.0  # what the store has under way is overdue
        if rng.random() < 0.4 and lease.load_state is not LoadState.FAILED:
            at.compute(rng.randrange(1, 5))
            at.check()
        others = [c for c in rig.pending if not isinstance(c, Fetch | Load)]
        rig.pending = [c for c in rig.pending if c not in others]
        rig.step([report for command in others for report in rig.reports(command)])
    at.finish()
