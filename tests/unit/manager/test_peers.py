"""Pages for peers and from them: what is granted stays, what comes enters the tree in order."""

from __future__ import annotations

import pytest

from quire.components import PoolSize
from quire.config import WriteConfig, WritePolicy
from quire.manager import Intake, Lease, ReadablePages
from quire.messages import Backup, Cancel, Fetch, PeerPart, PeerSource, Serve, Transferred, Write
from quire.types import PageStatus, Tier, num_pages
from support import FAILED, MIXES, OK, Rig

every_mix = pytest.mark.parametrize("mix", MIXES)
LAST = 6


def source(grant: int = 7, first: int = 0) -> PeerSource:
    return PeerSource("epoch", grant, first, [PeerPart("tcp://peer:1", 0, 1)])


def served(rig: Rig, command: Serve) -> list[Transferred]:
    """The last word of a grant that was cancelled and that nobody reads any more."""
    return [
        Transferred(command.op, rank, command.component, 0, bytes(num_pages(command.host)), True)
        for rank in range(rig.ranks)
    ]


# ---- giving --------------------------------------------------------------------------------------


@every_mix
def test_what_is_computed_is_backed_up_and_granted_whatever_the_write_policy(mix: str) -> None:
    rig = Rig(mix=mix, store=False, write=WriteConfig(WritePolicy.WRITE_BACK))
    key = rig.doc(LAST, seed=1)
    lease = rig.compute(key)
    export = rig.manager.exports.open(2, LAST)
    assert rig.manager.exports.grant(export, lease) == []  # it is only on the device
    rig.step()
    rig.answer_all(Backup)
    grants = rig.manager.exports.grant(export, lease)
    assert export.complete
    assert {(g.component, g.first, g.first + g.count) for g in grants} == {
        (c.name, *c.span(2, LAST)) for c in rig.manager.components
    }
    rig.manager.release(lease)
    rig.step()
    serves = rig.take_all(Serve)
    rig.manager.flush(Tier.HOST)
    rig.manager.check_invariants()
    for grant in grants:
        assert rig.free(Tier.HOST, grant.component) <= 64 - grant.count
    rig.manager.exports.close(export)
    rig.step()
    assert {c.op for c in rig.take_all(Cancel)} == {g.op for g in grants}
    rig.manager.flush(Tier.HOST)
    assert rig.free(Tier.HOST) < 64  # somebody may still be reading
    for command in serves:
        rig.step(served(rig, command))
    rig.run()
    rig.manager.flush(Tier.HOST)
    assert rig.free(Tier.HOST) == 64


def test_pages_are_granted_as_they_are_computed() -> None:
    rig = Rig(store=False)
    key = rig.doc(LAST, seed=1)
    lease = rig.acquire(key)
    export = rig.manager.exports.open(0, LAST)
    granted: list[ReadablePages] = []
    for stop in (2, 3, LAST):
        assert rig.grow(lease, key[:stop])
        rig.step()
        rig.answer_all(Backup)
        granted += rig.manager.exports.grant(export, lease)
        assert sum(g.count for g in granted) == stop
    assert [(g.first, g.count) for g in granted] == [(0, 2), (2, 1), (3, 3)]
    rig.manager.exports.close(export)
    rig.manager.release(lease)


def test_a_repair_grants_pages_before_those_that_were_asked_for_c26() -> None:
    rig = Rig(store=False)
    key = rig.doc(LAST, seed=1)
    lease = rig.compute(key)
    rig.run()
    export = rig.manager.exports.open(4, LAST)
    (first,) = rig.manager.exports.grant(export, lease)
    rig.manager.exports.repair(export, 1, 4)
    assert not export.complete
    (second,) = rig.manager.exports.grant(export, lease)
    assert ((first.first, first.count), (second.first, second.count)) == ((4, 2), (1, 3))
    rig.manager.exports.close(export)
    rig.manager.release(lease)


# ---- taking --------------------------------------------------------------------------------------


def opened(rig: Rig, pages: int = LAST) -> tuple[Lease, Intake]:
    lease = rig.acquire(rig.doc(pages, seed=1))
    return lease, rig.manager.offers.open(lease, pages, 10.0)


def offer_all(rig: Rig, intake: Intake) -> None:
    for number, component in enumerate(rig.manager.components):
        first, last = component.span(0, LAST)
        rig.manager.offers.take(intake, component.name, first, last - first, source(number))


@every_mix
def test_what_comes_is_usable_and_is_nobodys_when_it_is_not_wanted_any_more(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    lease, intake = opened(rig)
    offer_all(rig, intake)
    rig.step()
    for command in rig.take_all(Fetch):
        rig.answer(command, statuses=OK)
    assert lease.tail.end >= intake.last
    assert (lease.num_device, lease.num_host) == (0, LAST)
    assert rig.manager.load(lease) == LAST
    rig.run()
    rig.manager.release(lease)
    assert rig.matched(rig.doc(LAST, seed=1))[0] == LAST


@every_mix
def test_pages_may_come_in_any_order_and_twice(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    lease, intake = opened(rig)
    rig.manager.offers.take(intake, "full", 3, 3, source(1))
    rig.manager.offers.take(intake, "full", 3, 3, source(1))
    rig.step()
    (late,) = rig.take_all(Fetch)
    rig.answer(late, statuses=OK)
    assert lease.num_host == 0  # what lies before it is missing
    offer_all(rig, intake)
    rig.step()
    commands = rig.take_all(Fetch)
    full = next(c for c in commands if c.component == "full")
    assert num_pages(full.host) == 3
    assert full.source is not None
    assert full.source.first == 0
    for command in reversed(commands):
        rig.answer(command, statuses=OK)
    assert lease.tail.end >= intake.last
    rig.manager.release(lease)


def test_pages_that_do_not_come_are_named_and_may_be_offered_again_c26() -> None:
    rig = Rig(store=False)
    lease, intake = opened(rig)
    offer_all(rig, intake)
    rig.step()
    rig.answer(rig.take(Fetch), statuses=[OK, OK, FAILED, OK, FAILED, OK])
    assert intake.failed == [(2, PageStatus.FAILED), (4, PageStatus.FAILED)]
    assert lease.num_host == 2
    intake.failed.clear()
    rig.manager.offers.take(intake, "full", 2, 3, source(2))
    rig.step()
    pieces = rig.take_all(Fetch)
    assert [(num_pages(c.host), c.source and c.source.first) for c in pieces] == [(1, 0), (1, 2)]
    for piece in pieces:
        rig.answer(piece, statuses=OK)
    assert lease.tail.end >= intake.last
    rig.manager.release(lease)


@every_mix
def test_release_gives_back_what_has_come_and_what_is_on_its_way_c28(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    lease, intake = opened(rig)
    rig.manager.offers.take(intake, "full", 4, 2, source(1))
    rig.step()
    rig.answer(rig.take(Fetch), statuses=OK)
    rig.manager.offers.take(intake, "full", 0, 2, source(2))
    rig.step()
    late = rig.take(Fetch)
    rig.manager.release(lease)
    rig.step()
    assert [c.op for c in rig.take_all(Cancel)] == [late.op]
    assert rig.free(Tier.HOST) == 62  # the bytes may still be arriving
    rig.answer(late, statuses=OK)
    assert rig.free(Tier.HOST) == 64
    assert rig.matched(rig.doc(LAST, seed=1)) == (0, 0)


def test_a_full_host_delays_what_is_offered_and_loses_nothing() -> None:
    rig = Rig(store=False, host=8)
    blocker = rig.acquire(rig.doc(6, seed=2))
    intake = rig.manager.offers.open(blocker, 6, 10.0)
    rig.manager.offers.take(intake, "full", 0, 6, source(1))
    rig.step()
    lease, waiting = opened(rig)
    offer_all(rig, waiting)
    rig.step()
    blocking, part = rig.take_all(Fetch)
    assert (num_pages(blocking.host), num_pages(part.host)) == (6, 2)
    rig.answer(part, statuses=OK)
    assert lease.num_host == 2
    assert not waiting.idle
    rig.answer(blocking, statuses=OK)
    rig.manager.release(blocker)
    rig.step()
    rig.answer(rig.take(Fetch), statuses=OK)
    assert lease.tail.end >= waiting.last
    rig.manager.release(lease)


def test_what_others_put_into_the_tree_meanwhile_is_used_and_the_copy_freed_c27() -> None:
    rig = Rig(store=False)
    lease, intake = opened(rig)
    offer_all(rig, intake)
    rig.step()
    fetch = rig.take(Fetch)
    rig.cache(rig.doc(4, seed=1))
    rig.answer(fetch, statuses=OK)
    assert lease.tail.end >= intake.last
    assert rig.manager.counters.duplicate_pages == 4
    rig.manager.release(lease)


@pytest.mark.parametrize("by", ["peer", "store"])
def test_window_pages_that_no_prefix_ends_behind_any_more_are_let_go(by: str) -> None:
    """A prefix whose window has holes is kept while its pages are being written; then pages come
    that go on from it. What was left of the old window is of no use to anybody."""
    rig = Rig(mix="full+window", window_pages=3, pools={"window": PoolSize(8, 4)})
    key = rig.doc(10, seed=1)
    lease = rig.acquire(key[:7])
    for stop in range(1, 8):
        assert rig.grow(lease, key[:stop])
    rig.manager.release(lease)
    rig.step()
    for _ in range(2):  # then it may go without a copy on the host
        rig.answer_all(Backup, "window", statuses=FAILED)
    writes = rig.take_all(Write)  # of full pages: they stay meanwhile
    other = rig.acquire(rig.doc(7, seed=2))
    assert rig.grow(other, other.key)  # takes window pages of the first, its last ones first
    assert rig.matched(key[:7]) == (0, 0)

    rig.cache_in_store(key)
    lease = rig.acquire(key)
    if by == "peer":
        intake = rig.manager.offers.open(lease, 10, 10.0)
        rig.manager.offers.take(intake, "full", 0, 10, source())
        rig.manager.offers.take(intake, "window", 7, 3, source())
    else:
        rig.manager.prefetch(lease)
    rig.run()
    assert rig.matched(key) == (0, 10)
    for command in writes:
        rig.answer(command)
    for each in (lease, other):
        rig.manager.release(each)
    rig.run()


def test_pages_that_come_wait_for_own_copies_of_the_same_that_are_on_their_way_c26() -> None:
    """The device has the prefix and is copying it; its request has yielded the device, and the
    same pages come from a peer before the copy of their window has ended."""
    rig = Rig(mix="full+window", store=False)
    first = rig.acquire(rig.doc(LAST, seed=1))
    assert rig.grow(first, first.key)
    rig.manager.release(first)
    rig.step()
    copies = rig.take_all(Backup)
    for command in [c for c in copies if c.component == "full"]:
        rig.answer(command, statuses=OK)
    lease = rig.acquire(rig.doc(LAST, seed=1))
    rig.manager.yield_device(lease)
    intake = rig.manager.offers.open(lease, LAST, 10.0)
    offer_all(rig, intake)
    rig.step()
    for command in rig.take_all(Fetch):
        rig.answer(command, statuses=OK)
    assert intake.is_hindered(rig.now)
    assert lease.tail.end < LAST
    for command in [c for c in copies if c.component == "window"]:
        rig.answer(command, statuses=OK)
    rig.step()
    assert lease.tail.end == LAST
    rig.manager.release(lease)
