"""Several ranks: agreed lengths, and ranks that are slow, short or gone (C24)."""

from __future__ import annotations

import random

import pytest

from quire.manager import Decline, LoadState
from quire.messages import Backup, Fetch, Load, Probe, Probed, Transferred, WorkerLost, Write
from quire.types import Tier
from support import FAILED, MISS, OK, Rig


def fetching(rig: Rig, pages: int):  # type: ignore[no-untyped-def]
    key = rig.doc(pages, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    rig.answer(rig.take(Probe))  # of the first page: the store is asked for more
    return key, lease, prefetch


def test_probe_hit_is_the_minimum_over_ranks_c24() -> None:
    rig = Rig(ranks=3)
    key, lease, prefetch = fetching(rig, 6)
    probe = rig.take(Probe)
    rig.step([Probed(probe.op, rank, "full", [hits]) for rank, hits in ((2, 3), (0, 2), (1, 3))])
    assert prefetch.num_fetching == 3
    rig.run()
    rig.manager.release(lease)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_short_rank_shortens_the_prefix_for_all_c24(order: tuple[int, int]) -> None:
    rig = Rig(ranks=2)
    key, lease, prefetch = fetching(rig, 6)
    rig.answer_all(Probe)
    fetch = rig.take(Fetch)
    answers = {0: [OK] * 6, 1: [OK, OK, MISS, OK, OK, OK]}
    for rank in order:
        assert not rig.manager.ready(lease)
        rig.answer(fetch, statuses=answers[rank], ranks=[rank])
    assert rig.manager.admit(lease) == 2
    assert rig.free(Tier.HOST) == 62
    rig.manager.release(lease)


def test_slow_rank_delays_but_never_diverges_c24() -> None:
    rig = Rig(ranks=2)
    key, lease, prefetch = fetching(rig, 6)
    rig.answer_all(Probe)
    fetch = rig.take(Fetch)
    rig.answer(fetch, ranks=[0])  # complete there
    rig.step(rig.reports(fetch, statuses=[OK] * 4, ranks=[1], final=False))
    assert rig.manager.admit(lease) == 4  # what all have
    rig.manager.release(lease)
    assert rig.free(Tier.HOST) == 58
    rig.step(rig.reports(fetch, statuses=[OK] * 2, ranks=[1], first=4))
    assert rig.free(Tier.HOST) == 60


def test_backup_failing_on_one_rank_is_no_copy_c24() -> None:
    rig = Rig(ranks=2, store=False)
    key = rig.doc(3, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    backup = rig.take(Backup)
    rig.answer(backup, ranks=[0])
    rig.answer(backup, ranks=[1], statuses=[OK, FAILED, OK])
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 0)


def test_load_failing_on_one_rank_fails_for_all_c24() -> None:
    rig = Rig(ranks=2, store=False)
    key = rig.doc(3, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    rig.manager.load(lease)
    rig.step()
    load = rig.take(Load)
    rig.answer(load, ranks=[1], statuses=[OK, FAILED, OK])
    assert lease.load_state is LoadState.LOADING
    rig.answer(load, ranks=[0])
    assert lease.load_state is LoadState.FAILED  # type: ignore[comparison-overlap]
    assert rig.matched(key) == (1, 2)
    rig.manager.release(lease)


def test_write_missing_on_one_rank_is_tried_again_c24() -> None:
    rig = Rig(ranks=2)
    key = rig.doc(3, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer(rig.take(Backup))
    write = rig.take(Write)
    rig.answer(write, ranks=[0])
    rig.answer(write, ranks=[1], statuses=[OK, OK, FAILED])
    assert rig.manager.counters.write_retried_pages == 3
    rig.now += 10.0
    rig.run()
    assert rig.manager.counters.written_pages == 3


@pytest.mark.parametrize("seed", range(8))
def test_no_interleaving_of_reports_changes_the_result_c24(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(ranks=3)
    key, lease, prefetch = fetching(rig, 8)
    rig.answer_all(Probe)
    fetch = rig.take(Fetch)
    lengths = {rank: rng.randrange(2, 9) for rank in range(3)}
    reports = {
        rank: [
            Transferred(fetch.op, rank, "full", i, bytes([OK if i < good else MISS]), i == 7)
            for i in range(8)
        ]
        for rank, good in lengths.items()
    }
    while any(reports.values()):
        rank = rng.choice([r for r, left in reports.items() if left])
        rig.step([reports[rank].pop(0)])
    assert rig.manager.admit(lease) == min(lengths.values())
    rig.manager.release(lease)


def test_lost_rank_ends_everything_it_was_part_of_c24() -> None:
    rig = Rig(ranks=2, device=32)
    cached = rig.doc(3, seed=5)
    rig.cache_on_host(cached)
    key, lease, prefetch = fetching(rig, 6)
    rig.answer_all(Probe)
    fetch = rig.take(Fetch)
    loading = rig.acquire(cached)
    rig.manager.load(loading)
    rig.step()
    load = rig.take(Load)
    rig.answer(load, ranks=[0])
    rig.answer(fetch, ranks=[0])
    rig.step([WorkerLost(1, "killed")])
    assert loading.load_state is LoadState.FAILED
    assert rig.manager.ready(lease)
    assert rig.manager.idle
    for each in (lease, loading):
        rig.manager.release(each)
    rig.manager.check_invariants()
    after = rig.acquire(rig.doc(4, seed=9))
    assert rig.manager.prefetch(after).declined is Decline.WORKER_LOST
    rig.manager.release(after)


def test_a_copy_that_one_rank_never_ends_is_late_in_its_own_time_c15() -> None:
    """The others' ends say nothing of it: a request does not wait for each of them anew."""
    rig = Rig(ranks=3, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 4
    rig.step()
    load = rig.take(Load)
    for rank in (0, 1):
        rig.now += 29.0
        rig.answer(load, ranks=[rank])
        assert lease.load_state is LoadState.LOADING
    rig.now += 29.0
    rig.step()
    assert lease.load_state is LoadState.FAILED
    rig.manager.release(lease)
    rig.answer(load, ranks=[2])
    rig.manager.check_invariants()
