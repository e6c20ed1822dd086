"""Copies between device and host, seen from the leader (C9, C11)."""

from __future__ import annotations

import pytest

from quire.errors import LeaseError
from quire.manager import LoadState
from quire.messages import Backup, Load
from quire.types import Tier
from support import FAILED, OK, PAGE, Rig, tokens_for


def test_host_copy_is_visible_only_after_it_landed_c9() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backup = rig.take(Backup)
    assert rig.manager.flush(Tier.DEVICE) == 0  # the copy reads those pages
    assert rig.matched(key) == (4, 0)
    rig.answer(backup)
    assert rig.manager.flush(Tier.DEVICE) == 4
    assert rig.matched(key) == (0, 4)


def test_failed_backup_leaves_no_host_copy_c9() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer(rig.take(Backup), statuses=[OK, OK, FAILED, OK])
    assert rig.free(Tier.HOST) == 64
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 0)
    assert rig.manager.counters.backup_failed_pages == 4


def test_split_while_a_backup_is_in_flight_c9() -> None:
    rig = Rig(store=False)
    base = tokens_for(6, seed=1)
    rig.manager.release(rig.compute(rig.key(base)))
    rig.step()
    backup = rig.take(Backup)
    branch = rig.acquire(rig.key(base[: 2 * PAGE] + tokens_for(2, seed=2)))  # splits after page 2
    assert branch.num_device == 2
    rig.manager.check_invariants()
    rig.answer(backup, statuses=[OK, OK, OK, FAILED, OK, OK])
    rig.manager.release(branch)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(rig.key(base)) == (0, 2)  # the part before the split is good


def test_second_request_while_a_backup_is_in_flight_c9() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backup = rig.take(Backup)
    second = rig.compute(key)
    rig.manager.release(second)
    rig.step()
    assert not rig.has(Backup)  # one copy is enough
    rig.answer(backup)
    assert rig.manager.counters.backed_up_pages == 4


def test_abort_while_a_load_is_in_flight_c9() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    rig.manager.load(lease)
    rig.step()
    load = rig.take(Load)
    rig.manager.release(lease)
    assert rig.manager.flush(Tier.DEVICE) == 0
    assert rig.matched(key) == (0, 4)
    rig.answer(load)
    assert rig.matched(key) == (4, 0)


def test_load_brings_host_pages_to_the_device_c11() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 4
    assert lease.load_state is LoadState.LOADING
    rig.step()
    load = rig.take(Load)
    assert load.device == lease.pages
    assert rig.matched(key) == (0, 4)  # not readable before it has arrived
    rig.answer(load)
    assert lease.load_state is LoadState.IDLE
    assert rig.matched(key) == (4, 0)
    rig.manager.release(lease)


def test_partial_load_takes_what_fits_c11() -> None:
    rig = Rig(device=8, store=False)
    key = rig.doc(6, seed=1)
    rig.cache_on_host(key)
    blocker = rig.compute(rig.doc(5, seed=2))
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 3
    assert (lease.num_device, lease.num_host) == (3, 3)
    rig.run()
    assert rig.matched(key) == (3, 3)
    rig.manager.release(lease)
    rig.manager.release(blocker)
    rig.manager.check_invariants()


def test_load_without_room_changes_nothing_and_the_request_recomputes_c11() -> None:
    rig = Rig(device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    blocker = rig.compute(rig.doc(8, seed=2))
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 0
    assert not rig.manager.extend(lease, 1)
    assert rig.matched(key) == (0, 4)
    assert rig.manager.counters.load_declined_pages == 4
    rig.manager.release(blocker)
    assert rig.manager.extend(lease, 4)
    assert rig.manager.commit(lease, key) == 4
    rig.manager.release(lease)
    rig.manager.check_invariants()


def test_one_live_load_per_node_and_others_join_c11() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    first, second = rig.acquire(key), rig.acquire(key)
    assert rig.manager.load(first) == rig.manager.load(second) == 4
    assert first.pages == second.pages
    rig.step()
    rig.answer(rig.take(Load))
    assert first.load_state is second.load_state is LoadState.IDLE
    rig.manager.release(first)
    rig.manager.release(second)


def test_joining_a_load_after_a_split_c11() -> None:
    rig = Rig(store=False)
    base = tokens_for(6, seed=1)
    rig.cache_on_host(rig.key(base))
    first = rig.acquire(rig.key(base))
    rig.manager.load(first)
    second = rig.acquire(rig.key(base[: 3 * PAGE]))
    assert rig.manager.load(second) == 3
    assert second.pages == first.pages[:12]
    rig.step()
    rig.answer(rig.take(Load))
    assert second.load_state is LoadState.IDLE
    rig.manager.release(first)
    rig.manager.release(second)


def test_several_loads_at_once_end_in_any_order_c11() -> None:
    rig = Rig(store=False)
    keys = [rig.doc(3, seed=s) for s in range(3)]
    for key in keys:
        rig.cache_on_host(key)
    leases = [rig.acquire(key) for key in keys]
    for lease in leases:
        rig.manager.load(lease)
    rig.step()
    loads = [c for c in rig.pending if isinstance(c, Load)]
    rig.pending.clear()
    assert len(loads) == 3
    for load, lease in reversed(list(zip(loads, leases, strict=True))):
        assert lease.load_state is LoadState.LOADING
        rig.answer(load)
        assert lease.load_state is LoadState.IDLE
    for lease in leases:
        rig.manager.release(lease)


def test_failed_load_is_told_and_its_pages_come_back_c11() -> None:
    rig = Rig(device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    first, second = rig.acquire(key), rig.acquire(key)
    rig.manager.load(first)
    rig.manager.load(second)
    rig.step()
    rig.answer(rig.take(Load), statuses=[OK, OK, FAILED, OK])
    assert first.load_state is second.load_state is LoadState.FAILED
    assert rig.matched(key) == (2, 2)
    assert rig.manager.commit(first, key) == 0
    rig.manager.release(first)
    assert rig.free(Tier.DEVICE) == 4  # the second request may still read them
    rig.manager.release(second)
    assert rig.free(Tier.DEVICE) == 6
    again = rig.acquire(key)
    assert rig.manager.load(again) == 2
    rig.run()
    assert again.load_state is LoadState.IDLE
    rig.manager.release(again)


def test_load_below_a_failed_load_fails_with_it_c11() -> None:
    rig = Rig(store=False)
    base = tokens_for(4, seed=1)
    rig.cache_on_host(rig.key(base))
    upper = rig.acquire(rig.key(base[: 2 * PAGE]))
    rig.manager.load(upper)
    rig.step()
    first = rig.take(Load)
    whole = rig.acquire(rig.key(base))
    rig.manager.load(whole)
    rig.step()
    rig.answer(rig.take(Load))  # the lower half arrives first
    rig.answer(first, statuses=[OK, FAILED])
    assert whole.load_state is upper.load_state is LoadState.FAILED
    rig.manager.release(whole)
    rig.manager.release(upper)
    assert rig.matched(rig.key(base)) == (1, 3)
    rig.manager.check_invariants()


def test_overdue_load_fails_its_requests_and_keeps_its_pages_until_the_report_c11() -> None:
    rig = Rig(device=8, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    rig.manager.load(lease)
    rig.step()
    load = rig.take(Load)
    rig.now += 1000.0
    rig.step()
    assert lease.load_state is LoadState.FAILED
    rig.manager.release(lease)
    assert rig.free(Tier.DEVICE) == 4  # somebody may still be writing there
    rig.answer(load)
    assert rig.free(Tier.DEVICE) == 8
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
