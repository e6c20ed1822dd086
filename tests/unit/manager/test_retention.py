"""What somebody asks to be kept is found until its time is over, and costs others a share."""

from __future__ import annotations

import pytest

from quire.eviction import GO_FIRST, MAX_LEVEL, EvictionKind
from quire.keys import PrefixKey
from quire.manager import Wish
from quire.messages import Touch
from quire.types import HOST, TENANT_MARK, Tier, split_keys
from support import MIXES, PAGE, Rig, namespace, tokens_for

KEEP = Wish(retain_s=60.0, level=1)


def burst(rig: Rig, count: int, *, pages: int = 4, first: int = 1000, **options) -> None:
    """Prompts that nobody asks for again."""
    for seed in range(first, first + count):
        rig.cache(rig.doc(pages, seed), **options)


def found(rig: Rig, key) -> int:
    return rig.manager.match(key).num_pages


@pytest.mark.parametrize("kind", EvictionKind)
@pytest.mark.parametrize("mix", MIXES)
def test_a_retained_prefix_is_found_until_its_time_is_over(mix: str, kind: EvictionKind) -> None:
    rig = Rig(mix=mix, device=40, host=40, store=False, eviction=kind)
    kept, plain = rig.doc(6, seed=1), rig.doc(6, seed=2)
    rig.cache(kept, wish=KEEP)
    rig.cache(plain)
    rig.now = 59.0
    burst(rig, 40)
    assert found(rig, kept) == 6
    assert found(rig, plain) == 0
    rig.now = 61.0
    burst(rig, 40, first=2000)
    assert found(rig, kept) == 0
    rig.manager.check_invariants()


def test_whose_time_is_over_goes_before_what_was_used_since() -> None:
    rig = Rig(device=40, host=0, store=False)
    kept, plain = rig.doc(6, seed=1), rig.doc(6, seed=2)
    rig.cache(plain)
    rig.cache(kept, wish=KEEP)
    rig.now = 61.0
    burst(rig, 8)
    assert (found(rig, kept), found(rig, plain)) == (2, 6)


def test_asking_again_renews_it() -> None:
    rig = Rig(device=40, host=0, store=False)
    kept = rig.doc(6, seed=1)
    for turn in range(5):
        rig.now = turn * 40.0
        rig.cache(kept, wish=KEEP)
        burst(rig, 20, first=1000 * turn)
        assert found(rig, kept) == 6


@pytest.mark.parametrize("host", [0, 60])
def test_no_more_than_a_share_of_a_tier_is_retained(host: int) -> None:
    """Everybody asks for everything: the tier works as it does when nobody asks."""
    rig = Rig(device=40, host=host, store=False, retained_share=0.25)
    for seed in range(30):
        rig.cache(rig.doc(4, seed), wish=Wish(3600.0, MAX_LEVEL))
        for slot, retained in enumerate(rig.manager._core.tree.standing.retained):
            assert retained.num_pages <= (40, host)[slot % 2] * 0.25
    others = [rig.doc(4, seed) for seed in range(100, 106)]
    for key in others:
        rig.cache(key)
    assert [found(rig, key) for key in others] == [4] * 6
    rig.manager.check_invariants()


def test_of_what_is_too_much_the_head_is_retained() -> None:
    rig = Rig(device=40, host=0, store=False, retained_share=0.25)
    long = rig.doc(20, seed=1)
    rig.cache(long, wish=KEEP)
    burst(rig, 20)
    assert 1 <= found(rig, long) <= 10


def test_a_range_of_the_prompt() -> None:
    rig = Rig(device=40, host=0, store=False)
    whole = rig.doc(8, seed=1)
    rig.cache(whole, wish=KEEP._replace(num_pages=3))
    burst(rig, 20)
    assert found(rig, whole) == 3
    rig.manager.check_invariants()


def test_ranges_of_a_prompt_each_for_its_own_time() -> None:
    """The system prompt for an hour, the talk for a minute, what a tool said not at all."""
    rig = Rig(device=40, host=0, store=False, retained_share=0.5)
    talk = Wish(60.0, 1, num_pages=6, then=Wish(level=GO_FIRST))
    whole, plain = rig.doc(9, seed=1), rig.doc(6, seed=2)
    rig.cache(plain)
    rig.cache(whole, wish=Wish(3600.0, 1, num_pages=3, then=talk))
    burst(rig, 7)
    assert (found(rig, whole), found(rig, plain)) == (6, 6), "the tool's output went first"
    burst(rig, 20, first=2000)
    assert (found(rig, whole), found(rig, plain)) == (6, 0)
    rig.now = 61.0
    burst(rig, 20, first=3000)
    assert found(rig, whole) == 3
    rig.now = 3601.0
    burst(rig, 20, first=4000)
    assert found(rig, whole) == 0
    rig.manager.check_invariants()


@pytest.mark.parametrize(
    "head", [Wish(num_pages=4), Wish(60.0, 1, 4), Wish(level=GO_FIRST, num_pages=4)]
)
def test_what_lies_before_a_range_is_kept_with_it(head: Wish) -> None:
    rig = Rig(device=40, host=0, store=False, retained_share=0.5)
    whole = rig.doc(8, seed=1)
    rig.cache(whole, wish=head._replace(then=Wish(600.0, 2, num_pages=7)))
    rig.now = 500.0
    burst(rig, 20)
    assert found(rig, whole) == 7
    rig.manager.check_invariants()


@pytest.mark.parametrize("mix", MIXES)
def test_the_store_has_a_range_and_nothing_behind_it(mix: str) -> None:
    rig = Rig(mix=mix)
    whole = rig.doc(8, seed=1)
    rig.cache(whole, wish=Wish(num_pages=3, then=Wish(num_pages=5, stored=False)))
    assert rig.stored["full"] == set(split_keys(whole.page_keys(0, 3)))
    assert found(rig, whole) == 8
    rig.cache(whole, wish=Wish(num_pages=3, then=Wish(stored=False)))
    assert rig.stored["full"] == set(split_keys(whole.page_keys(0, 3)))
    rig.cache(whole)  # somebody who does not mind
    rig.cache(whole)
    assert rig.stored["full"] == set(split_keys(whole.page_keys(0, 8)))
    rig.manager.check_invariants()


@pytest.mark.parametrize("detached", [False, True])
def test_the_store_is_told_until_the_time_is_over_and_then_no_more(detached: bool) -> None:
    rig = Rig()
    rig.cache(rig.doc(4, seed=1), wish=KEEP)
    told = 0
    if detached:
        rig.manager.store.detach()
        rig.run()
    while (due := rig.manager.next_wakeup()) is not None and due < 300.0:
        rig.now = due
        told += sum(isinstance(command, Touch) for command in rig.step())
        rig.pending = []
    assert due is None, "nothing is due for ever"
    assert 55.0 <= rig.now <= 70.0
    assert told == 0 if detached else 10 < told < 15


def test_the_higher_level_stays_longer() -> None:
    rig = Rig(device=40, host=0, store=False, retained_share=1.0)
    low, high = rig.doc(6, seed=1), rig.doc(6, seed=2)
    rig.cache(high, wish=Wish(60.0, 2))
    rig.cache(low, wish=KEEP)
    blocker = rig.acquire(rig.doc(1, seed=3))
    assert rig.manager.extend(blocker, 34)
    assert (found(rig, low), found(rig, high)) == (0, 6)
    assert rig.manager.extend(blocker, 6), "retention is no lock: all of it can be had"
    assert found(rig, high) == 0
    rig.manager.release(blocker)
    rig.manager.check_invariants()


def test_tiers() -> None:
    """Retained on the host alone: it leaves the device as any other, and the host last."""
    rig = Rig(device=40, host=60, store=False)
    kept = rig.doc(6, seed=1)
    rig.cache(kept, wish=KEEP._replace(tiers=(False, True)))
    burst(rig, 40)
    match = rig.manager.match(kept)
    assert (match.num_device, match.num_host) == (0, 6)


def test_each_tier_for_as_long_as_was_asked_of_it() -> None:
    """A minute on the device, and by somebody else an hour on the host: after a minute it leaves
    the device as any other."""
    rig = Rig(device=40, host=60, store=False)
    kept = rig.doc(6, seed=1)
    rig.cache(kept, wish=Wish(60.0, 1, tiers=(True, False)))
    rig.cache(kept, wish=Wish(3600.0, 1, tiers=(False, True)))
    rig.now = 59.0
    burst(rig, 40)
    assert rig.manager.match(kept).num_device == 6
    rig.now = 61.0
    burst(rig, 40, first=2000)
    match = rig.manager.match(kept)
    assert (match.num_device, match.num_host) == (0, 6)
    rig.manager.check_invariants()


def test_what_is_asked_again_of_the_device_alone_is_kept_on_the_host_no_longer() -> None:
    """Also where the device was about to let go of it, so that its copy stood to be kept; and who
    asks for its beginning alone meanwhile is served."""
    rig = Rig(device=60, host=60, store=False)
    tokens = tokens_for(8, seed=1)
    kept = rig.key(tokens)
    rig.cache(kept, wish=KEEP)
    (node,) = rig.manager.match(kept).walk.nodes
    rig.manager._core.tree.standing.keep_spare(node, HOST)
    rig.now = 61.0
    rig.cache(kept, wish=KEEP._replace(tiers=(True, False)))
    rig.manager.check_invariants()
    rig.cache(rig.key(tokens[: 3 * PAGE] + tokens_for(2, seed=2)))
    rig.manager.check_invariants()
    rig.manager.flush(Tier.DEVICE)
    burst(rig, 40)
    assert found(rig, kept) == 0


def test_a_range_that_nobody_asks_to_keep_has_no_time_of_its_own() -> None:
    """It is kept for what lies behind it, as long as that is, whatever time stands beside it."""
    rig = Rig(device=40, host=0, store=False, retained_share=0.5)
    whole = rig.doc(8, seed=1)
    rig.cache(whole, wish=Wish(3600.0, 0, num_pages=4, then=Wish(60.0, 1, num_pages=7)))
    rig.now = 59.0
    burst(rig, 20)
    assert found(rig, whole) == 7
    rig.now = 61.0
    burst(rig, 20, first=2000)
    assert found(rig, whole) == 0


def test_what_is_used_once_goes_first_but_not_what_others_use() -> None:
    rig = Rig(device=40, host=0, store=False)
    system = tokens_for(4, seed=1)
    plain = rig.doc(6, seed=2)
    rig.cache(plain)
    once = rig.key(system + tokens_for(6, seed=3))
    rig.cache(rig.key(system))
    rig.cache(once, wish=Wish(level=GO_FIRST))
    assert found(rig, once) == 10, "there was room"
    burst(rig, 7)
    assert found(rig, plain) == 6
    assert found(rig, once) == 6, "of its own pages some have gone"
    rig.manager.check_invariants()


def test_what_the_store_may_not_have_it_does_not_get() -> None:
    rig = Rig()
    secret = rig.doc(4, seed=1)
    rig.cache(secret, wish=Wish(stored=False))
    again = rig.key([*secret.tokens.tolist(), *tokens_for(2, seed=2)])
    rig.cache(again, wish=Wish(stored=False))
    assert not rig.stored["full"]
    assert found(rig, again) == 6
    rig.cache(again)  # somebody else has the same prompt, and does not mind
    rig.cache(again)
    assert rig.in_store(again)
    rig.manager.check_invariants()


def test_who_computes_it_again_for_itself_takes_nothing_back() -> None:
    """It lies on the host, to be kept. Somebody else has the same prompt, computes it without
    waiting for the copy, and asks nothing but that the store must not have it."""
    rig = Rig(device=40, host=40, store=False)
    kept = rig.doc(6, seed=1)
    rig.cache(kept, wish=KEEP)
    rig.manager.flush(Tier.DEVICE)
    other = rig.acquire(kept, wish=Wish(stored=False))
    assert rig.grow(other, kept)
    rig.manager.release(other)
    rig.run()
    burst(rig, 40)
    assert found(rig, kept) == 6
    rig.manager.check_invariants()


@pytest.mark.parametrize("first", [None, Wish(stored=False)])
def test_answers_go_on_from_each_other_whatever_was_asked(first: Wish | None) -> None:
    """A prompt that is secret grows from one that is not, and the other way round."""
    rig = Rig(host=64)
    head = rig.doc(3, seed=1)
    whole = rig.key([*head.tokens.tolist(), *tokens_for(3, seed=2)])
    rig.cache(head, wish=first)
    rig.cache(whole, wish=Wish(stored=False) if first is None else None)
    assert rig.in_store(head) == (first is None) or rig.in_store(whole)
    assert found(rig, whole) == 6
    if first is None:
        assert not rig.in_store(whole)
    rig.manager.check_invariants()


def test_preempted_requests_keep_their_wish() -> None:
    rig = Rig(device=40, host=0, store=False)
    key = rig.doc(6, seed=1)
    lease = rig.compute(key[:3], wish=KEEP)
    rig.manager.release(lease)
    rig.cache(key, wish=KEEP, again=True)
    burst(rig, 20)
    assert found(rig, key) == 6


def test_splits_keep_the_count() -> None:
    rig = Rig(device=60, host=60, store=False)
    base = tokens_for(8, seed=1)
    rig.cache(rig.key(base), wish=KEEP)
    for cut in (2, 5, 7):
        rig.cache(rig.key(base[: cut * PAGE] + tokens_for(2, seed=cut)), wish=KEEP)
        rig.manager.check_invariants()
    rig.manager.flush(Tier.DEVICE)
    rig.manager.check_invariants()
    rig.manager.flush(Tier.HOST)
    assert not any(r.sizes for r in rig.manager._core.tree.standing.retained)


# ---- quotas --------------------------------------------------------------------------------------


def tenant_doc(tenant: str, pages: int, seed: int) -> PrefixKey:
    return PrefixKey(namespace(salt=tenant), tokens_for(pages, seed))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("host", [0, 60])
def test_a_tenant_at_its_quota_costs_nobody_else_a_page(mix: str, host: int) -> None:
    rig = Rig(mix=mix, device=60, host=host, store=False, tenant_share=0.4)
    others = [tenant_doc("b", 4, seed) for seed in range(4)] + [rig.doc(4, seed=9)]
    for key in others:
        rig.cache(key)
    for seed in range(100, 160):
        rig.cache(tenant_doc("a", 3, seed))
        device, on_host = rig.manager.pages_of(namespace(salt="a"))
        assert device <= 24
        assert on_host <= 24
    assert [found(rig, key) for key in others] == [4] * 5
    assert found(rig, tenant_doc("a", 3, 159)) == 3, "what it used last it has"
    rig.manager.check_invariants()


def test_a_request_that_needs_more_than_the_quota_is_computed_all_the_same() -> None:
    rig = Rig(device=60, host=0, store=False, tenant_share=0.2)
    rig.cache(tenant_doc("a", 30, seed=1))
    rig.cache(tenant_doc("a", 4, seed=2))
    assert rig.manager.pages_of(namespace(salt="a"))[0] <= 12
    rig.manager.check_invariants()


def test_who_has_no_salt_has_no_quota() -> None:
    rig = Rig(device=60, host=0, store=False, tenant_share=0.2)
    for seed in range(10):
        rig.cache(rig.doc(4, seed))
    assert rig.manager.pages_of(rig.namespace) == (40, 0)
    assert not rig.manager.counters.evicted_own_pages


def test_what_is_over_takes_nobodys_share() -> None:
    """Nothing was evicted since: those whose time is over stand where they stood."""
    rig = Rig(device=40, host=0, store=False)  # ten may be retained
    rig.cache(rig.doc(6, seed=1), wish=Wish(retain_s=1.0, level=2))
    rig.now = 2.0
    kept = rig.doc(6, seed=2)
    rig.cache(kept, wish=KEEP)
    burst(rig, 20)
    assert found(rig, kept) == 6


def test_what_is_retained_on_the_host_is_not_given_up_for_copies_above_it() -> None:
    rig = Rig(device=40, host=16, store=False)
    kept = rig.doc(4, seed=1)
    rig.cache(kept, wish=KEEP)
    rig.manager.flush(Tier.DEVICE)
    lease = rig.acquire(kept[:3])  # the device has the head again, and the host the end alone
    rig.manager.load(lease)
    rig.run()
    rig.manager.release(lease)
    for seed in range(40):
        rig.now += 0.1
        rig.cache(rig.doc(4, 1000 + seed))
        assert found(rig, kept) == 4


def test_what_a_tenant_asked_to_keep_goes_last_of_its_own() -> None:
    rig = Rig(device=40, host=0, store=False, tenant_share=0.3)
    kept = tenant_doc("a", 4, 1)
    rig.cache(kept, wish=KEEP)
    for seed in range(2, 20):
        rig.cache(tenant_doc("a", 4, seed))
    assert found(rig, kept) == 4


@pytest.mark.parametrize("tier", Tier)
def test_what_a_tenant_fetches_and_loads_counts(tier: Tier) -> None:
    """Its prefixes come from the store, and from the host to the device: all of it is room that
    others, who have only what is in that tier, would have to make."""
    rig = Rig(device=40, host=40, tenant_share=0.3)
    modest = [tenant_doc("modest", 4, seed) for seed in (1, 2)]
    for key in modest:
        rig.cache(key)
    rig.manager.flush(Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE)
    for seed in range(100, 140):
        key = tenant_doc("greedy", 4, seed)
        rig.cache_in_store(key)
        lease = rig.acquire(key)
        rig.manager.prefetch(lease)
        rig.run()
        rig.manager.admit(lease)
        if tier is Tier.DEVICE:
            assert rig.manager.load(lease) == 4
            rig.run()
        rig.manager.release(lease)
    assert [found(rig, key) for key in modest] == [4, 4]
    assert rig.manager.counters.fetched_pages > 40


def test_requests_of_a_tenant_count_together() -> None:
    """Pages that its other requests compute are its own before they are cached."""
    rig = Rig(device=40, host=0, store=False, tenant_share=0.5)
    rig.cache(modest := tenant_doc("modest", 8, 1))
    for seed in (2, 3):
        rig.cache(tenant_doc("greedy", 8, seed))
    leases = [rig.acquire(tenant_doc("greedy", 8, seed)) for seed in (4, 5)]
    assert all(rig.manager.extend(lease, 8) for lease in leases)
    rig.cache(tenant_doc("other", 12, 6))
    assert found(rig, modest) == 8


def test_a_tenant_with_several_salts_has_one_quota() -> None:
    rig = Rig(device=40, host=0, store=False, tenant_share=0.3)
    rig.cache(modest := tenant_doc("modest", 8, 1))
    for seed in range(2, 20):
        rig.cache(tenant_doc(f"greedy{TENANT_MARK}{seed}", 4, seed))
    assert found(rig, modest) == 8
    rig.manager.check_invariants()
