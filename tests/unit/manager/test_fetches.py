"""Fetches by several requests: pages on their way are shared, nobody is turned away for want of a
budget that will be free again, what moves is not late (C15, C21, C37)."""

from __future__ import annotations

import gc

import pytest

from quire.config import PrefetchPolicy
from quire.keys import PrefixKey
from quire.manager import Lease, Prefetch, PrefetchState
from quire.messages import Cancel, Fetch, PeerPart, PeerSource, Probe
from quire.types import PAGE_KEY_BYTES, PageStatus, Tier, num_pages
from support import MISS, MIXES, OK, Rig, tokens_for

every_mix = pytest.mark.parametrize("mix", MIXES)
WAIT = {"policy": PrefetchPolicy.WAIT_COMPLETE}


def wanting(rig: Rig, keys: list[PrefixKey]) -> list[tuple[Lease, Prefetch]]:
    """Requests that come together; their probes are answered."""
    leases = [rig.acquire(key) for key in keys]
    prefetches = [rig.manager.prefetch(lease) for lease in leases]
    rig.step()
    rig.answer_all(Probe)
    return list(zip(leases, prefetches, strict=True))


def finish(rig: Rig, requests: list[tuple[Lease, Prefetch]]) -> None:
    for lease, _ in requests:
        rig.manager.release(lease)
    rig.run()
    assert rig.inflight_pages == 0
    assert rig.manager.idle


# ---- shared -------------------------------------------------------------------------------------


@every_mix
def test_requests_for_one_prompt_that_come_together_fetch_it_once_c37(mix: str) -> None:
    rig = Rig(mix=mix, host=256, prefetch=WAIT | {"max_inflight_share": 0.5})
    key = rig.doc(100, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key] * 8)
    commands = rig.take_all(Fetch)
    assert [c.component for c in commands] == rig.parts
    for command in commands:
        assert not any(rig.manager.ready(lease) for lease, _ in requests)
        rig.answer(command)
    for lease, prefetch in requests:
        assert rig.manager.ready(lease)
        assert prefetch.num_landed == 100
        assert rig.manager.admit(lease) == 100
    assert not rig.manager.counters.declined
    finish(rig, requests)


def test_a_request_that_comes_later_shares_what_is_on_its_way_and_gets_the_rest_c37() -> None:
    rig = Rig(prefetch=WAIT)
    tokens = tokens_for(10, seed=1)
    short, long = rig.key(tokens[: 6 * 4]), rig.key(tokens)
    rig.cache_in_store(long)
    first = wanting(rig, [short])
    fetch = rig.take(Fetch)
    second = wanting(rig, [long])
    assert not rig.has(Fetch)
    rig.answer(fetch)
    rest = rig.take(Fetch)
    assert rest.keys == long.page_keys(6, 10)
    rig.answer(rest)
    assert rig.manager.admit(second[0][0]) == 10
    finish(rig, first + second)


def test_of_two_prompts_with_a_common_beginning_each_gets_its_own_end_c37() -> None:
    rig = Rig(prefetch=WAIT)
    beginning = tokens_for(6, seed=1)
    keys = [rig.key(beginning + tokens_for(4, seed=seed)) for seed in (2, 3)]
    for key in keys:
        rig.cache_in_store(key)
    requests = wanting(rig, keys)
    rig.answer(rig.take(Fetch))
    rest = rig.take(Fetch)
    assert rest.keys == keys[1].page_keys(6, 10)
    rig.answer(rest)
    assert [rig.manager.admit(lease) for lease, _ in requests] == [10, 10]
    assert [prefetch.num_landed for _, prefetch in requests] == [10, 10]
    finish(rig, requests)


@every_mix
def test_a_fetch_goes_on_for_the_others_when_the_first_is_aborted_c37(mix: str) -> None:
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key] * 3)
    commands = rig.take_all(Fetch)
    for lease, _ in requests[:2]:
        rig.manager.release(lease)
        rig.step()
    assert not rig.has(Cancel)
    for command in commands:
        rig.answer(command)
    assert rig.manager.admit(requests[2][0]) == 6
    finish(rig, requests[2:])


@every_mix
def test_a_fetch_is_stopped_when_nobody_wants_it_any_more_c37(mix: str) -> None:
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key] * 2)
    commands = rig.take_all(Fetch)
    for lease, _ in requests:
        rig.manager.release(lease)
    rig.step()
    assert rig.take(Cancel).op == commands[0].op
    for command in commands:
        rig.answer(command, statuses=PageStatus.CANCELLED)
    assert rig.free(Tier.HOST) == 64
    rig.manager.check_invariants()


def test_all_who_share_a_fetch_learn_that_it_came_to_nothing_c37() -> None:
    rig = Rig(prefetch=WAIT)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key] * 3)
    rig.answer(rig.take(Fetch), statuses=MISS)
    rig.step()
    assert not rig.has(Fetch)
    assert all(rig.manager.ready(lease) for lease, _ in requests)
    finish(rig, requests)


def source(grant: int) -> PeerSource:
    return PeerSource("epoch", grant, 0, [PeerPart("tcp://peer:1", 0, 1)])


@pytest.mark.parametrize("mix", MIXES[1:])
def test_pages_that_wait_for_their_state_are_not_fetched_again_c37(mix: str) -> None:
    """The state at the end is damaged; while that of a nearer point comes, another asks."""
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key, points=[3, 6])
    requests = wanting(rig, [key])
    rig.answer_all(Fetch, rig.parts[-1], statuses=MISS)
    state = rig.take_all(Fetch)
    assert state
    requests += wanting(rig, [key])
    assert not rig.has(Fetch)
    for command in state:
        rig.answer(command)
    assert [rig.manager.admit(lease) for lease, _ in requests] == [3, 3]
    finish(rig, requests)


@pytest.mark.parametrize("mix", MIXES[1:])
def test_pages_that_came_before_one_of_their_requests_left_are_not_fetched_again_c37(
    mix: str,
) -> None:
    """It goes when its full pages are there and the state is not; others wait for both."""
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key] * 2)
    full, *others = rig.take_all(Fetch)
    rig.answer(full)
    assert rig.manager.admit(requests[0][0]) == 0
    requests += wanting(rig, [key])
    assert not rig.has(Fetch)
    for command in others:
        rig.answer(command)
    assert [rig.manager.admit(lease) for lease, _ in requests[1:]] == [6, 6]
    finish(rig, requests)


def test_what_one_peer_sends_for_two_requests_is_read_once_c37() -> None:
    rig = Rig(store=False)
    leases = [rig.acquire(rig.doc(6, seed=1)) for _ in range(2)]
    intakes = [rig.manager.offers.open(lease, 6, 10.0) for lease in leases]
    for grant, intake in enumerate(intakes):
        rig.manager.offers.take(intake, "full", 0, 6, source(grant))
    rig.step()
    rig.answer(rig.take(Fetch), statuses=OK)
    rig.step()
    assert not rig.has(Fetch)
    assert [lease.num_host for lease in leases] == [6, 6]
    for lease in leases:
        rig.manager.release(lease)


def test_what_failed_for_one_is_read_by_the_other_from_its_own_offer_c37() -> None:
    rig = Rig(store=False)
    leases = [rig.acquire(rig.doc(6, seed=1)) for _ in range(2)]
    intakes = [rig.manager.offers.open(lease, 6, 10.0) for lease in leases]
    for grant, intake in enumerate(intakes):
        rig.manager.offers.take(intake, "full", 0, 6, source(grant))
    rig.step()
    rig.answer(rig.take(Fetch), statuses=[OK, OK, PageStatus.FAILED, OK, OK, OK])
    rig.step()
    again = rig.take(Fetch)
    assert again.source is not None
    assert (again.source.grant, again.source.first) == (1, 2)
    rig.answer(again, statuses=OK)
    assert [lease.num_host for lease in leases] == [2, 6]
    for lease in leases:
        rig.manager.release(lease)
    rig.run()
    rig.manager.check_invariants()


# ---- the budget ---------------------------------------------------------------------------------


@every_mix
def test_nobody_is_declined_for_want_of_a_budget_that_will_be_free_again_c37(mix: str) -> None:
    rig = Rig(mix=mix, host=64, prefetch=WAIT | {"max_inflight_share": 0.125})
    keys = [rig.doc(6, seed=seed) for seed in range(8)]
    for key in keys:
        rig.cache_in_store(key, points=range(1, 7))
    requests = wanting(rig, keys)
    order: list[bytes] = []
    while rig.has(Fetch):
        assert rig.inflight_pages <= 8
        commands = rig.take_all(Fetch)
        order += [c.keys[:PAGE_KEY_BYTES] for c in commands if c.component == "full"]
        for command in commands:
            rig.answer(command)
    assert [rig.manager.admit(lease) for lease, _ in requests] == [6] * 8
    firsts = [key.page_keys(0, 1) for key in keys]
    assert [key for key in order if key in firsts] == firsts  # in order of arrival
    assert not rig.manager.counters.declined
    finish(rig, requests)


def test_no_prompt_takes_the_whole_budget_while_others_wait_c15() -> None:
    rig = Rig(host=80, prefetch=WAIT | {"max_inflight_share": 0.5})
    keys = [rig.doc(40, seed=1), rig.doc(40, seed=2)]
    for key in keys:
        rig.cache_in_store(key)
    requests = wanting(rig, keys)
    sizes = [num_pages(c.host) for c in rig.pending if isinstance(c, Fetch)]
    assert sizes == [20, 20]
    finish(rig, requests)


def test_pages_from_peers_count_for_the_same_budget_c15() -> None:
    rig = Rig(host=40, prefetch=WAIT | {"max_inflight_share": 0.25})
    theirs = rig.acquire(rig.doc(20, seed=1))
    intake = rig.manager.offers.open(theirs, 20, 10.0)
    rig.manager.offers.take(intake, "full", 0, 20, source(1))
    rig.step()
    fetch = rig.take(Fetch)
    assert num_pages(fetch.host) == rig.inflight_pages == 10
    key = rig.doc(6, seed=2)
    rig.cache_in_store(key)
    ((lease, prefetch),) = wanting(rig, [key])
    assert prefetch.state is PrefetchState.WAITING
    rig.answer(fetch, statuses=OK)
    shares = sorted(num_pages(c.host) for c in rig.pending if isinstance(c, Fetch))
    assert shares == [5, 5]  # half each, while both have more to come
    for each in (theirs, lease):
        rig.manager.release(each)
    rig.run()


# ---- what moves is not late ---------------------------------------------------------------------


def test_a_fetch_that_moves_is_not_late_however_long_it_takes() -> None:
    rig = Rig(prefetch=WAIT | {"max_timeout_s": 10.0})
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    requests = wanting(rig, [key])
    command = rig.take(Fetch)
    for page in range(6):
        rig.now += 12.0
        rig.step(rig.reports(command, statuses=[OK], first=page, final=page == 5))
    assert rig.manager.counters.overdue_operations == 0
    assert rig.manager.admit(requests[0][0]) == 6
    finish(rig, requests)


def test_a_fetch_that_stops_moving_is_late_and_keeps_what_has_come() -> None:
    rig = Rig(prefetch=WAIT | {"max_timeout_s": 10.0})
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    ((lease, _),) = wanting(rig, [key])
    command = rig.take(Fetch)
    rig.now += 12.0
    rig.step(rig.reports(command, statuses=[OK, OK], final=False))
    rig.now += 14.0
    rig.step()
    assert not rig.manager.ready(lease)
    rig.now = rig.manager.next_wakeup() or 0.0
    rig.step()
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == 2
    rig.answer(command, statuses=[OK] * 4, first=2)
    rig.manager.release(lease)
    assert rig.free(Tier.HOST) == 62


def test_nobody_waits_in_line_behind_a_fetch_that_may_never_end() -> None:
    rig = Rig(host=64, prefetch=WAIT | {"max_inflight_share": 0.125, "max_timeout_s": 10.0})
    keys = [rig.doc(8, seed=1), rig.doc(6, seed=2)]
    for key in keys:
        rig.cache_in_store(key)
    (first,) = wanting(rig, keys[:1])
    (second,) = wanting(rig, keys[1:])
    stuck = rig.take(Fetch)
    assert rig.inflight_pages == 8
    assert second[1].state is PrefetchState.WAITING
    rig.now += 60.0  # it has its time, and holds its pages whatever happens
    rig.step()
    rig.step()
    assert rig.inflight_pages == 8
    for lease, _ in (first, second):
        assert rig.manager.ready(lease)
        assert rig.manager.admit(lease) == 0
    rig.answer(stuck)
    finish(rig, [first, second])


# ---- partial results ----------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES[1:])
def test_what_has_come_is_of_use_up_to_the_last_point_before_a_fault_c21(mix: str) -> None:
    """The store has state after every second page; the seventh page of ten is damaged."""
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(10, seed=1)
    rig.cache_in_store(key, points=[2, 4, 6, 8, 10])
    ((lease, _),) = wanting(rig, [key])
    rig.answer_all(Fetch, statuses=[OK] * 6 + [PageStatus.CORRUPT] * 4)
    assert not rig.manager.ready(lease)
    assert {c.component for c in rig.pending if isinstance(c, Fetch)} == set(rig.parts[1:])
    rig.run()
    assert rig.manager.admit(lease) == 6
    finish(rig, [(lease, lease.prefetch)])  # type: ignore[list-item]


@pytest.mark.parametrize("mix", MIXES[1:])
def test_a_nearer_point_does_when_the_state_of_the_last_is_damaged_c22(mix: str) -> None:
    rig = Rig(mix=mix, prefetch=WAIT)
    key = rig.doc(10, seed=1)
    rig.cache_in_store(key, points=[4, 10])
    ((lease, _),) = wanting(rig, [key])
    rig.answer_all(Fetch, rig.parts[-1], statuses=PageStatus.CORRUPT)
    rig.run()
    assert rig.manager.admit(lease) == 4
    finish(rig, [(lease, lease.prefetch)])  # type: ignore[list-item]


# ---- probes gallop ------------------------------------------------------------------------------


@every_mix
def test_a_miss_at_the_first_page_costs_one_key(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(500, seed=1)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.step()
    probes = rig.take_all(Probe)
    assert [probe.queries for probe in probes] == [[key.page_keys(0, 1)]] * len(rig.parts)
    for probe in probes:
        rig.answer(probe)
    assert not rig.has(Probe)
    assert rig.manager.ready(lease)
    rig.manager.release(lease)


@every_mix
@pytest.mark.parametrize("hit", [2, 3, 4, 5, 16, 17, 40])
def test_a_hit_of_any_length_is_found_in_a_few_questions(mix: str, hit: int) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(40, seed=1)
    rig.cache_in_store(key[:hit])
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    rounds, asked = 0, 0
    while rig.has(Probe):
        rounds += 1
        probes = rig.take_all(Probe)
        asked += len(probes[0].queries[0]) // PAGE_KEY_BYTES
        for probe in probes:
            rig.answer(probe)
    assert prefetch.num_hit == hit
    assert rounds <= 4
    assert asked <= 4 * (hit + 1)
    rig.run()
    assert rig.manager.admit(lease) == hit
    rig.manager.release(lease)


@every_mix
def test_where_answers_are_slow_the_second_question_is_for_all_the_rest(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(40, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    rounds = 0
    while rig.has(Probe):
        rounds += 1
        rig.now += 7.0
        for probe in rig.take_all(Probe):
            rig.answer(probe)
    assert rounds == 2
    assert prefetch.num_hit == 40
    rig.run()
    assert rig.manager.admit(lease) == 40
    rig.manager.release(lease)


# ---- after the end ------------------------------------------------------------------------------


def test_what_a_request_knew_is_gone_with_it_and_waits_for_no_collection() -> None:
    """A prompt's tokens, and all that was noted for it, are as long as the prompt."""
    rig = Rig(store=True)
    gc.collect()
    gc.disable()
    try:
        lease = rig.acquire(rig.doc(4, seed=1))
        rig.manager.prefetch(lease)
        rig.run()
        rig.manager.release(lease)
        rig.run()
        rig.manager.next_wakeup()  # as an engine asks before it sleeps
        del lease
        assert not [each for each in gc.get_objects() if type(each) in (Lease, Prefetch)]
    finally:
        gc.enable()
