"""Copies between device and host, seen from the leader (C9, C11)."""

from __future__ import annotations

import pytest

from quire.errors import LeaseError
from quire.keys import PrefixKey
from quire.manager import Lease, LoadState, Wish
from quire.messages import Backup, Fetch, Load, PeerSource, Probe
from quire.types import PageIds, PageStatus, Tier, page_array
from support import FAILED, MIX_PARTS, OK, PAGE, Rig, tokens_for


def failing(part: str, statuses: list[int]) -> list[int] | PageStatus:
    """These statuses for full; for another component, of which fewer pages move: all bad."""
    return statuses if part == "full" else FAILED


def test_host_copy_is_visible_only_after_it_landed_c9(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backups = rig.take_all(Backup)
    assert [backup.component for backup in backups] == rig.parts
    assert rig.manager.flush(Tier.DEVICE) == 0  # the copies read those pages
    for backup in backups:
        assert rig.matched(key) == (4, 0)
        rig.answer(backup)
    assert rig.manager.flush(Tier.DEVICE) == rig.weight(4)
    assert rig.matched(key) == (0, 4)


@pytest.mark.parametrize("last", range(3))
def test_no_component_is_on_the_host_before_its_own_copy_landed_c9(mix: str, last: int) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backups = rig.take_all(Backup)
    pending = backups.pop(last % len(backups))
    for backup in backups:
        rig.answer(backup)
    rig.manager.flush(Tier.DEVICE)
    assert sum(rig.matched(key)) == 4  # of what is still being copied the device's pages stay
    rig.answer(pending)
    rig.manager.flush(Tier.DEVICE)
    rig.manager.flush(Tier.HOST)
    assert not any((rig.used(Tier.DEVICE) | rig.used(Tier.HOST)).values())


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS)
def test_failed_backup_leaves_no_host_copy_c9(mix: str, part: str) -> None:
    rig = Rig(mix=mix, store=False, window_pages=4)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    bad = failing(part, [OK, OK, FAILED, OK])
    tries = 1 if part == "full" else 2  # of state that the host's pages are useless without
    for _ in range(tries):
        rig.answer_all(Backup, part, statuses=bad)
    assert rig.used(Tier.HOST)[part] == 0
    assert rig.manager.counters.backup_failed_pages == tries * (1 if part == "recurrent" else 4)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 0)
    assert not any(rig.used(Tier.HOST).values())  # the others' copies are of no use without it


def test_split_while_a_backup_is_in_flight_c9(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    base = tokens_for(6, seed=1)
    rig.manager.release(rig.compute(rig.key(base)))
    rig.step()
    backups = rig.take_all(Backup)
    key = rig.key(base[: 2 * PAGE] + tokens_for(2, seed=2))
    branch = rig.acquire(key)
    assert branch.num_device == (2 if mix == "full" else 0)  # no state to go on from there
    assert rig.grow(branch, key)  # splits after page 2
    rig.manager.check_invariants()
    for backup in backups:
        bad = [OK, OK, OK, FAILED, OK, OK] if backup.component == "full" else None
        rig.answer(backup, statuses=bad)
    rig.manager.release(branch)
    rig.run()
    rig.manager.flush(Tier.DEVICE)
    # The part before the split is good, and the state at the fork was kept and copied too.
    assert rig.matched(rig.key(base)) == (0, 2)
    assert rig.matched(key) == (0, 4)


def test_second_request_while_a_backup_is_in_flight_c9(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backups = rig.take_all(Backup)
    second = rig.compute(key)
    rig.manager.release(second)
    rig.step()
    assert not rig.has(Backup)  # one copy is enough
    for backup in backups:
        rig.answer(backup)
    assert rig.manager.counters.backed_up_pages == rig.weight(4)


def test_abort_while_a_load_is_in_flight_c9(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    rig.manager.load(lease)
    rig.step()
    loads = rig.take_all(Load)
    rig.manager.release(lease)
    assert rig.manager.flush(Tier.DEVICE) == 0
    for load in loads:
        assert rig.matched(key) == (0, 4)
        rig.answer(load)
    assert rig.matched(key) == (4, 0)


def test_load_brings_host_pages_to_the_device_c11(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 4
    assert lease.load_state is LoadState.LOADING
    rig.step()
    loads = {load.component: load for load in rig.take_all(Load)}
    assert list(loads) == rig.parts
    assert loads["full"].device == lease.pages
    if lease.state is not None and lease.state.window is not None:
        assert lease.state.window.first == 2
        assert loads["window"].device.endswith(lease.state.window.pages)
    if lease.state is not None and lease.state.recurrent is not None:
        assert [lease.state.recurrent.restore] == page_array(loads["recurrent"].device).tolist()
    for load in loads.values():
        assert rig.matched(key) == (0, 4)  # not readable before it has arrived
        assert lease.load_state is LoadState.LOADING
        rig.answer(load)
    assert lease.load_state is LoadState.IDLE  # type: ignore[comparison-overlap]
    assert rig.matched(key) == (4, 0)
    rig.manager.release(lease)


def test_partial_load_takes_what_fits_c11(mix: str) -> None:
    rig = Rig(mix=mix, device=8, store=False)
    key = rig.doc(6, seed=1)
    rig.cache_with_point(key, 3)
    rig.manager.flush(Tier.DEVICE)
    blocker = rig.compute(rig.doc(4, seed=2))
    assert rig.manager.extend(blocker, 1)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 3
    assert (lease.num_device, lease.num_host) == (3, 3)
    rig.run()
    assert rig.matched(key) == (3, 3)
    rig.manager.release(lease)
    rig.manager.release(blocker)
    rig.manager.check_invariants()


def test_load_without_room_changes_nothing_and_the_request_recomputes_c11(mix: str) -> None:
    rig = Rig(mix=mix, device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    blocker = rig.compute(rig.doc(8, seed=2))
    before = rig.used(Tier.DEVICE)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 0
    assert not rig.manager.extend(lease, 1)
    assert rig.used(Tier.DEVICE) == before
    assert rig.matched(key) == (0, 4)
    assert rig.manager.counters.load_declined_pages == 4
    rig.manager.release(blocker)
    assert rig.grow(lease, key)
    assert lease.num_device == 4
    rig.manager.release(lease)
    rig.manager.check_invariants()


def test_one_live_load_per_node_and_others_join_c11(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    first, second = rig.acquire(key), rig.acquire(key)
    assert rig.manager.load(first) == rig.manager.load(second) == 4
    assert first.pages == second.pages
    rig.step()
    loads = rig.take_all(Load)
    assert len(loads) == len(rig.parts)
    for load in loads:
        rig.answer(load)
    assert first.load_state is second.load_state is LoadState.IDLE
    rig.manager.release(first)
    rig.manager.release(second)


def test_joining_a_load_after_a_split_c11(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    rig.cache_with_point(key, 3)
    rig.manager.flush(Tier.DEVICE)
    first = rig.acquire(key)
    rig.manager.load(first)
    second = rig.acquire(key[:3])
    assert rig.manager.load(second) == 3
    assert second.pages == first.pages[:12]
    rig.step()
    loads = [load for load in rig.take_all(Load) if load.component == "full"]
    assert len(loads) == 1
    rig.answer(loads[0])
    rig.run()
    assert (second.load_state is LoadState.IDLE) == (mix == "full")
    rig.manager.release(first)
    rig.manager.release(second)


def test_several_loads_at_once_end_in_any_order_c11(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    keys = [rig.doc(3, seed=s) for s in range(3)]
    for key in keys:
        rig.cache_on_host(key)
    leases = [rig.acquire(key) for key in keys]
    for lease in leases:
        rig.manager.load(lease)
    rig.step()
    loads = rig.take_all(Load)
    assert len(loads) == 3 * len(rig.parts)
    for lease in reversed(leases):
        assert lease.load_state is LoadState.LOADING
        for load in loads:
            if load.op in lease.loads:
                rig.answer(load)
        assert lease.load_state is LoadState.IDLE  # type: ignore[comparison-overlap]
    for lease in leases:
        rig.manager.release(lease)


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS)
def test_failed_load_is_told_and_its_pages_come_back_c11(mix: str, part: str) -> None:
    """Full alone keeps what has arrived; several components are of use together or not at all."""
    rig = Rig(mix=mix, device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    first, second = rig.acquire(key), rig.acquire(key)
    rig.manager.load(first)
    rig.manager.load(second)
    rig.step()
    rig.answer_all(Load, part, statuses=failing(part, [OK, OK, FAILED, OK]))
    arrived = 2 if mix == "full" else 0
    assert first.load_state is second.load_state is LoadState.FAILED
    assert rig.matched(key) == (arrived, 4 - arrived)
    assert rig.manager.commit(first, key) == 0
    rig.manager.release(first)
    assert rig.free(Tier.DEVICE) == 4  # the second request may still read them
    rig.manager.release(second)
    assert rig.free(Tier.DEVICE) == 8 - arrived
    assert sum(rig.used(Tier.DEVICE).values()) == arrived
    again = rig.acquire(key)
    assert rig.manager.load(again) == 4 - arrived
    rig.run()
    assert again.load_state is LoadState.IDLE
    assert rig.matched(key) == (4, 0)
    rig.manager.release(again)


def test_pages_of_a_failed_load_come_back_although_others_hold_the_prefix_c11(mix: str) -> None:
    """They came while it was on its way, and have the host's copy. One that computes by itself then
    needs the room; nobody else would ever give it."""
    rig = Rig(mix=mix, device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    first = rig.acquire(key)
    rig.manager.load(first)
    other, waiting = rig.acquire(key), rig.acquire(key)
    rig.manager.yield_device(waiting)
    rig.step()
    rig.answer_all(Load, statuses=FAILED)
    rig.manager.release(first)
    assert (other.num_device, other.num_host) == (waiting.num_device, waiting.num_host) == (0, 4)
    assert rig.free(Tier.DEVICE) == 8
    assert not any(rig.used(Tier.DEVICE).values())
    assert rig.manager.extend(other, 8)
    rig.manager.release(other)
    assert rig.manager.admit(waiting) == 4
    assert rig.manager.load(waiting) == 4
    rig.run()
    rig.manager.release(waiting)
    assert rig.matched(key) == (4, 0)


def test_who_stands_on_pages_that_are_nowhere_any_more_goes_on_from_those_before_them_c11(
    mix: str,
) -> None:
    """The end of a prompt has overtaken its beginning, and its copy on the host went as spare; then
    the beginning does not arrive, and takes the end with it. The engine ended there."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_with_point(key, 2)
    rig.manager.flush(Tier.DEVICE)
    loading = [rig.acquire(key[:2]), rig.acquire(key)]
    for lease in loading:
        rig.manager.load(lease)
        rig.step()
    loads = rig.take_all(Load)
    first = [load for load in loads if load.op == loads[0].op]
    for load in loads[len(first) :]:
        rig.answer(load)
    for lease in loading:
        rig.manager.release(lease)
    other = rig.acquire(key)
    assert rig.manager.flush(Tier.HOST)
    for load in first:
        rig.answer(load, statuses=FAILED)
    assert (other.num_device, other.num_host) == rig.matched(key) == (0, 2)
    rig.run()
    assert rig.manager.load(other) == 2
    rig.run()
    assert rig.grow(other, key)
    rig.manager.release(other)
    rig.run()
    assert rig.matched(key) == (4, 0)


def test_a_beginning_that_does_not_arrive_takes_all_behind_it_that_has_overtaken_it_c11(
    mix: str,
) -> None:
    """In however many nodes that is, and nobody uses any of them. The engine ended there."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(8, seed=1)
    rig.cache_with_point(key, 2)
    rig.manager.flush(Tier.DEVICE)
    loading = [rig.acquire(key[:2]), rig.acquire(key)]
    for lease in loading:
        rig.manager.load(lease)
        rig.step()
    loads = rig.take_all(Load)
    first = [load for load in loads if load.op == loads[0].op]
    for load in loads[len(first) :]:
        rig.answer(load)
    for lease in loading:
        rig.manager.release(lease)
    rig.manager.flush(Tier.HOST)
    rig.step([report for load in first for report in rig.reports(load, statuses=FAILED)])
    rig.run()
    assert rig.matched(key)[0] == 0
    assert not any(rig.used(Tier.DEVICE).values())


def stand_on_what_overtook(rig: Rig, key: PrefixKey) -> tuple[Load, Lease]:
    """The end of four pages has come before their beginning, which is still on its way: one who
    counts on that end has loaded it, and the host's copies went as spare. The load that has not
    come, and the one who counts on it."""
    rig.cache(key[:4])
    rig.manager.flush(Tier.DEVICE)
    loading = [rig.acquire(key[:2]), rig.acquire(key[:4])]
    for lease in loading:
        rig.manager.load(lease)
        rig.step()
    first, second = rig.take_all(Load)
    rig.answer(second)
    for lease in loading:
        rig.manager.release(lease)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 4
    rig.step()
    assert rig.manager.flush(Tier.HOST) == 2
    return first, lease


def test_what_a_peer_brings_waits_for_who_stands_on_pages_that_did_not_arrive_c26() -> None:
    """It came in the same step, and was hung under pages about to go: the engine ended."""
    rig = Rig(store=False)
    key = rig.doc(6, seed=1)
    first, lease = stand_on_what_overtook(rig, key)
    intake = rig.manager.offers.open(lease, 6, 10.0)
    rig.manager.offers.take(intake, "full", 4, 2, PeerSource("peer", 7, 0, []))
    rig.step()
    fetch = rig.take(Fetch)
    rig.step([*rig.reports(first, statuses=FAILED), *rig.reports(fetch, statuses=OK)])
    assert lease.load_state is LoadState.FAILED
    rig.manager.check_invariants()
    rig.manager.release(lease)
    rig.run()
    assert rig.matched(key) == (0, 2)


@pytest.mark.parametrize("num_kept", [None, 3])
def test_room_made_for_another_moves_nobody_whose_load_has_failed_c11(num_kept: int | None) -> None:
    """Its pages go when it lets go of them. They went before, and it still named them."""
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    first, lease = stand_on_what_overtook(rig, key)
    if num_kept is not None:
        lease.wish = Wish(retain_s=60.0, level=1, num_pages=num_kept)
    rig.answer(first, statuses=FAILED)
    assert lease.load_state is LoadState.FAILED
    num_free = rig.free(Tier.DEVICE)
    rig.manager._let_go_of_copies()  # as a stream that waits for room has it done
    assert rig.free(Tier.DEVICE) == num_free
    rig.manager.check_invariants()
    rig.manager.release(lease)
    rig.run()
    assert rig.matched(key) == (0, 2)


def test_what_the_store_brings_is_not_hung_under_pages_that_are_about_to_go_c11() -> None:
    rig = Rig()
    key = rig.doc(8, seed=1)
    rig.cache_in_store(key)
    first, lease = stand_on_what_overtook(rig, key[:4])
    other = rig.acquire(key)
    rig.manager.prefetch(other)
    rig.step()
    while rig.has(Probe):
        rig.answer_all(Probe)
    fetch = rig.take(Fetch)
    rig.answer(first, statuses=FAILED)
    rig.step(rig.reports(fetch, statuses=OK))
    rig.manager.release(lease)
    rig.manager.check_invariants()
    rig.manager.release(other)
    rig.run()
    assert rig.matched(key) == (0, 2)


@pytest.mark.parametrize("order", [1, -1])
def test_which_page_comes_back_first_does_not_depend_on_where_leases_lie_in_memory(
    order: int,
) -> None:
    """Else the same seed of a simulation was not always the same run."""
    rig = Rig(device=6, store=False)
    tokens = tokens_for(4, seed=1)
    keys = [rig.key(tokens), rig.key(tokens[: 2 * PAGE] + tokens_for(2, seed=2))]
    for key in keys:
        rig.cache_on_host(key)
    loading = [rig.acquire(key) for key in (keys[0][:2], *keys)]
    for lease in loading:
        rig.manager.load(lease)
        rig.step()
    first, *below = rig.take_all(Load)
    for load in below:  # they overtake what they hang under
        rig.answer(load)
    for lease in loading:
        rig.manager.release(lease)
    others = [rig.acquire(key) for key in keys]
    rig.manager.leases = dict.fromkeys(others[::order])  # type: ignore[assignment]
    rig.answer(first, statuses=FAILED)
    rig.manager.leases = set(others)
    assert rig.free(Tier.DEVICE) == 6
    came_back = page_array(PageIds(b"".join(load.device for load in (*below, first))))
    assert rig.manager._core.allocators[0].free_pages().tolist() == came_back.tolist()
    for lease in others:
        rig.manager.release(lease)


def test_load_below_a_failed_load_fails_with_it_c11(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_with_point(key, 2)
    rig.manager.flush(Tier.DEVICE)
    upper = rig.acquire(key[:2])
    assert rig.manager.load(upper) == 2
    rig.step()
    first = rig.take_all(Load)
    whole = rig.acquire(key)
    assert rig.manager.load(whole) == 4
    rig.step()
    rig.answer_all(Load)  # the lower half arrives first
    for load in first:
        rig.answer(load, statuses=[OK, FAILED] if load.component == "full" else None)
    assert whole.load_state is upper.load_state is LoadState.FAILED
    rig.manager.release(whole)
    rig.manager.release(upper)
    arrived = 1 if mix == "full" else 0
    assert rig.matched(key) == (arrived, 4 - arrived)
    rig.manager.check_invariants()


def test_overdue_load_fails_its_requests_and_keeps_its_pages_until_the_report_c11(
    mix: str,
) -> None:
    rig = Rig(mix=mix, device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    rig.manager.load(lease)
    rig.step()
    loads = rig.take_all(Load)
    rig.now += 1000.0
    rig.step()
    assert lease.load_state is LoadState.FAILED
    rig.manager.release(lease)
    for load in loads:
        assert rig.free(Tier.DEVICE) == 4  # somebody may still be writing there
        assert sum(rig.used(Tier.DEVICE).values()) == rig.weight(4)
        rig.answer(load)
    assert rig.free(Tier.DEVICE) == 8
    assert not any(rig.used(Tier.DEVICE).values())
    assert rig.matched(key) == (0, 4)


def test_releasing_twice_names_the_owner() -> None:
    rig = Rig(store=False)
    lease = rig.acquire(rig.doc(1, seed=1))
    rig.manager.release(lease)
    with pytest.raises(LeaseError, match="'r1'"):
        rig.manager.release(lease)


def test_leaving_the_with_block_releases_also_on_error() -> None:
    rig = Rig(store=False)
    key = rig.doc(3, seed=1)
    with pytest.raises(RuntimeError, match="boom"), rig.acquire(key) as lease:  # noqa: PT012
        rig.manager.extend(lease, 3)
        raise RuntimeError("boom")
    assert rig.free(Tier.DEVICE) == 64


def test_loading_after_computing_is_refused() -> None:
    rig = Rig(store=False)
    key = rig.doc(3, seed=1)
    lease = rig.acquire(key)
    rig.manager.extend(lease, 1)
    with pytest.raises(LeaseError, match="load before extend"):
        rig.manager.load(lease)
    rig.manager.release(lease)


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS)
def test_a_load_that_failed_while_its_request_waits_is_made_again_by_admit(
    mix: str, part: str
) -> None:
    """As when pages go on to the device while more of them come: others may have been given its
    device pages since."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 4
    rig.step()
    rig.answer_all(Load, part, statuses=failing(part, [OK, FAILED, OK, OK]))
    assert lease.load_state is LoadState.FAILED
    assert rig.manager.load(lease) == 0
    assert lease.load_state is LoadState.FAILED
    assert rig.manager.admit(lease) == 4
    assert lease.load_state is LoadState.IDLE
    rig.manager.load(lease)
    rig.run()
    assert lease.load_state is LoadState.IDLE
    assert lease.num_device == 4
    assert len(set(page_array(lease.pages).tolist())) == 4
    rig.manager.check_invariants()
