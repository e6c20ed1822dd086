"""PrefixTree and eviction through the manager, device tier only (C5–C8)."""

from __future__ import annotations

import random

import pytest

from quire.eviction import EvictionKind
from quire.keys import PrefixKey, UnitKind
from quire.types import Tier, page_array
from support import PAGE, Rig, tokens_for

UNITS = list(UnitKind)


def device_only(**options: object) -> Rig:
    return Rig(host=0, store=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", UNITS)
def test_insert_then_match_covers_all_full_pages_c5(unit: UnitKind) -> None:
    rig = device_only(unit=unit)
    key = rig.key(tokens_for(5, seed=1, unit=unit, extra=3))
    rig.cache(key)
    assert rig.matched(key) == (5, 0)
    assert rig.matched(key) == (5, 0)


@pytest.mark.parametrize("unit", UNITS)
def test_splitting_never_changes_a_match_c5(unit: UnitKind) -> None:
    rig = device_only(unit=unit)
    base = tokens_for(8, seed=1, unit=unit)
    rig.cache(rig.key(base))
    cuts = {n: rig.key(base[: n * PAGE + unit.overlap]) for n in range(9)}
    for n in (5, 2, 7, 1):  # a branch after page n splits the path there
        branch = base[: n * PAGE + unit.overlap] + tokens_for(2, seed=50 + n, unit=unit)
        rig.cache(rig.key(branch))
        assert {n: rig.matched(key) for n, key in cuts.items()} == {n: (n, 0) for n in cuts}
        rig.manager.check_invariants()


def test_match_is_a_pure_read_c5() -> None:
    rig = device_only()
    rig.cache(rig.doc(6, seed=1))
    changes = rig.manager._core.tree.changes
    rig.manager.match(rig.key(tokens_for(6, seed=1)[: 3 * PAGE]))
    assert rig.manager._core.tree.changes == changes


def test_duplicate_insert_frees_exactly_the_duplicates_c6() -> None:
    rig = device_only(device=20)
    key = rig.doc(4, seed=1)
    first, second = rig.acquire(key), rig.acquire(key)
    for lease in (first, second):
        assert rig.manager.extend(lease, 5)
    assert rig.free(Tier.DEVICE) == 10
    rig.manager.commit(first, key)
    assert rig.free(Tier.DEVICE) == 10
    rig.manager.commit(second, key)
    assert rig.free(Tier.DEVICE) == 14
    assert second.pages[:16] == first.pages[:16]
    rig.manager.release(first)
    rig.manager.release(second)
    assert rig.free(Tier.DEVICE) == 16
    rig.manager.check_invariants()


def test_reinsert_over_an_evicted_node_adopts_the_new_pages_c6() -> None:
    rig = Rig(store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    assert rig.matched(key) == (0, 4)
    lease = rig.acquire(key)
    assert rig.manager.extend(lease, 4)  # recomputes instead of loading
    mine = lease.private_pages
    rig.manager.commit(lease, key)
    assert lease.pages == mine
    assert rig.matched(key) == (4, 0)
    rig.manager.release(lease)
    rig.manager.check_invariants()


@pytest.mark.parametrize("kind", list(EvictionKind))
def test_locked_paths_are_never_evicted_c7(kind: EvictionKind) -> None:
    rig = device_only(device=12, eviction=kind)
    held = rig.doc(4, seed=1)
    lease = rig.compute(held)
    for seed in range(2, 12):
        rig.cache(rig.doc(4, seed=seed))
        assert rig.matched(held) == (4, 0)
    assert rig.manager.flush(Tier.DEVICE) == 8
    assert rig.matched(held) == (4, 0)
    rig.manager.release(lease)
    assert rig.manager.flush(Tier.DEVICE) == 4
    rig.manager.check_invariants()


@pytest.mark.parametrize("kind", list(EvictionKind))
def test_eviction_frees_what_was_asked_and_no_needless_node_c7(kind: EvictionKind) -> None:
    rng = random.Random(3)
    rig = device_only(device=60, eviction=kind)
    for seed in range(12):
        rig.cache(rig.doc(rng.randrange(1, 6), seed=seed))
    core = rig.manager._core
    while rig.free(Tier.DEVICE) < 60:
        before, wanted = rig.free(Tier.DEVICE), rng.randrange(1, 8)
        sizes = sorted(n.num_pages for n in core.tree.roots[rig.namespace.digest].children.values())
        freed = core.evict(Tier.DEVICE, wanted)
        assert freed == rig.free(Tier.DEVICE) - before
        assert freed >= min(wanted, 60 - before)
        assert freed < wanted + sizes[-1]  # without its last node it would have been too little
        rig.manager.check_invariants()


def test_eviction_cost_does_not_depend_on_the_number_of_leaves_c7() -> None:
    """Counts the holdings looked at, not time."""

    def looks_per_eviction(leaves: int) -> float:
        rig = device_only(device=leaves)
        for seed in range(leaves):
            rig.cache(rig.doc(1, seed=seed))
        core, looked = rig.manager._core, 0
        rule = core._may_go[Tier.DEVICE]

        def counting(holding: object) -> bool:
            nonlocal looked
            looked += 1
            return rule(holding)  # type: ignore[arg-type]

        core._may_go[Tier.DEVICE] = counting
        for _ in range(20):
            core.evict(Tier.DEVICE, 1)
        return looked / 20

    assert looks_per_eviction(30) == looks_per_eviction(300) == 1


def test_lru_evicts_the_least_recently_used_first() -> None:
    rig = device_only(device=12)
    docs = [rig.doc(3, seed=s) for s in range(4)]
    for doc in docs:
        rig.cache(doc)
    rig.manager.release(rig.acquire(docs[0]))  # use the oldest again
    rig.cache(rig.doc(3, seed=9))
    assert [rig.matched(d)[0] for d in docs] == [3, 0, 3, 3]


def test_fifo_ignores_use() -> None:
    rig = device_only(device=12, eviction=EvictionKind.FIFO)
    docs = [rig.doc(3, seed=s) for s in range(4)]
    for doc in docs:
        rig.cache(doc)
    rig.manager.release(rig.acquire(docs[0]))
    rig.cache(rig.doc(3, seed=9))
    assert [rig.matched(d)[0] for d in docs] == [0, 3, 3, 3]


def test_lfu_keeps_the_frequently_used() -> None:
    rig = device_only(device=12, eviction=EvictionKind.LFU)
    docs = [rig.doc(3, seed=s) for s in range(4)]
    for doc in docs:
        rig.cache(doc)
    for doc in (docs[0], docs[0], docs[2], docs[3]):
        rig.manager.release(rig.acquire(doc))
    rig.cache(rig.doc(3, seed=9))
    assert [rig.matched(d)[0] for d in docs] == [3, 0, 3, 3]


def test_slru_protects_the_reused_from_a_scan() -> None:
    rig = device_only(device=12, eviction=EvictionKind.SLRU)
    kept = rig.doc(3, seed=0)
    rig.cache(kept)
    rig.manager.release(rig.acquire(kept))
    for seed in range(1, 20):
        rig.cache(rig.doc(3, seed=seed))
    assert rig.matched(kept) == (3, 0)


def test_priority_is_kept_until_its_retention_decays() -> None:
    rig = device_only(device=12, eviction=EvictionKind.PRIORITY, retention_decay_s=10.0)
    kept = rig.doc(3, seed=0)
    rig.cache(kept, priority=2)
    for seed in range(1, 8):
        rig.cache(rig.doc(3, seed=seed))
    assert rig.matched(kept) == (3, 0)
    rig.now = 100.0
    for seed in range(8, 16):
        rig.cache(rig.doc(3, seed=seed))
    assert rig.matched(kept) == (0, 0)


@pytest.mark.parametrize("unit", UNITS)
def test_node_keys_equal_keys_from_scratch_after_splits_c4(unit: UnitKind) -> None:
    rig = Rig(unit=unit)
    base = tokens_for(6, seed=1, unit=unit)
    keys = [rig.key(base)]
    for n in (3, 1, 5):
        cut = base[: n * PAGE + unit.overlap]
        keys.append(rig.key(cut + tokens_for(2, seed=20 + n, unit=unit)))
    for key in keys:
        rig.cache(key)
    tree = rig.manager._core.tree
    for key in keys:
        chain = b"".join(tree.keys_of(node) for node in tree.walk(key).nodes)
        assert chain == PrefixKey(rig.namespace, key.tokens).page_keys()


def test_sizes_and_counters_equal_their_definitions_c8() -> None:
    rng = random.Random(5)
    rig = Rig(device=24, host=40)
    base = [tokens_for(6, seed=s) for s in range(3)]
    for _ in range(150):
        tokens = rng.choice(base)[: rng.randrange(1, 25)] + [rng.randrange(2) for _ in range(8)]
        rig.cache(rig.key(tokens))
        rig.manager.check_invariants()
    core = rig.manager._core
    pages = [
        page
        for order in (core.tree.standing.orders[Tier.DEVICE],)
        for holding in order.coldest()
        for page in page_array(holding.pages).tolist()
    ]
    assert len(pages) + rig.free(Tier.DEVICE) == 24
