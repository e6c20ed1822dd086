"""Prefetch: probing, host pressure, policies, budget, cost (C2, C12–C15, C17)."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from quire.config import PrefetchPolicy
from quire.keys import PrefixKey, UnitKind
from quire.manager import Decline, Fit, Lease, PrefetchState
from quire.messages import Backup, Cancel, Fetch, Probe, Probed
from quire.types import PAGE_KEY_BYTES, OperationId, PageStatus, Tier, num_pages, split_keys
from support import MISS, MIX_PARTS, OK, PAGE, Rig, tokens_for

UNITS = list(UnitKind)
WANTED, THRESHOLD = 8, 3


def pressed(mix: str, free: int, unit: UnitKind, *, evictable: int = 0) -> tuple[Rig, PrefixKey]:
    """A host with `free` pages free, `evictable` single-page leaves, all else held by leases.

    The key's first 2 pages are cached, its next WANTED pages are in the store only, with all that
    is needed to go on after any of them.
    """
    host = 24
    rig = Rig(mix=mix, device=200, host=host, unit=unit, threshold_pages=THRESHOLD)
    key = rig.doc(2 + WANTED, seed=1)
    rig.cache(rig.key(key[:2].tokens))
    rig.manager.flush(Tier.DEVICE)
    held = rig.doc(host - 2 - evictable - free, seed=2)
    rig.cache_on_host(held)
    for seed in range(evictable):
        rig.cache_on_host(rig.doc(1, seed=100 + seed))
    rig.acquire(held)
    assert rig.free(Tier.HOST) == free
    rig.empty_store()
    rig.cache_in_store(key, points=range(1, 3 + WANTED))
    return rig, key


def fetch(rig: Rig, key: PrefixKey):  # type: ignore[no-untyped-def]
    """Acquire, prefetch, and answer the probe."""
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    rig.answer_all(Probe)
    return lease, prefetch


def grown(before: dict[str, int], fetched: int) -> dict[str, int]:
    """Host pages when a cached prefix has been grown by so many pages fetched.

    The window moves along, unless a snapshot keeps the old end a point to go on from."""
    more = {"full": fetched, "window": 2 if "recurrent" in before else 0, "recurrent": 1}
    return {part: count + more[part] for part, count in before.items()}


def assert_all_back(rig: Rig, free_before: int) -> None:
    assert rig.inflight_pages == 0
    assert rig.free(Tier.HOST) == free_before
    assert rig.manager.idle
    rig.manager.check_invariants()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("free", "fetched"),
    [(0, 0), (THRESHOLD - 1, 0), (THRESHOLD, THRESHOLD), (5, 5), (WANTED, WANTED), (10, WANTED)],
)
def test_host_pressure_truncates_to_what_is_free_c12(
    mix: str, unit: UnitKind, free: int, fetched: int
) -> None:
    rig, key = pressed(mix, free, unit)
    before = rig.used(Tier.HOST)
    lease, prefetch = fetch(rig, key)
    counters = rig.manager.counters
    if fetched == 0:
        assert prefetch.declined is Decline.HOST_FULL
        assert counters.declined[Decline.HOST_FULL] == 1
        rig.manager.release(lease)
        assert_all_back(rig, free)
        assert rig.used(Tier.HOST) == before
        return
    fit = Fit.EXACT if fetched == WANTED else Fit.TRUNCATED
    assert counters.fetched == {fit: 1}
    assert rig.inflight_pages == fetched  # really reserved, not requested
    rig.run()
    assert prefetch.num_landed == fetched
    assert rig.manager.admit(lease) == 2 + fetched
    assert rig.matched(key) == (0, 2 + fetched)
    rig.manager.release(lease)
    assert_all_back(rig, free - fetched)
    assert rig.used(Tier.HOST) == grown(before, fetched)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("free", [0, THRESHOLD - 1, THRESHOLD, 5])
def test_host_pressure_evicts_exactly_the_shortfall_c12(
    mix: str, unit: UnitKind, free: int
) -> None:
    rig, key = pressed(mix, free, unit, evictable=9)
    before = rig.used(Tier.HOST)
    lease, prefetch = fetch(rig, key)
    assert prefetch.num_fetching == WANTED
    assert rig.manager.counters.fetched == {Fit.EVICTED: 1}
    assert rig.manager.counters.evicted_host_pages == WANTED - free
    rig.run()
    rig.manager.release(lease)
    assert_all_back(rig, 0)
    assert rig.matched(key) == (0, 2 + WANTED)
    evicted = {"full": WANTED - free, "window": WANTED - free, "recurrent": WANTED - free}
    before = {part: count - evicted[part] for part, count in before.items()}
    assert rig.used(Tier.HOST) == grown(before, WANTED)


@pytest.mark.parametrize("unit", UNITS)
def test_evict_then_truncate_when_eviction_is_not_enough_c12(mix: str, unit: UnitKind) -> None:
    rig, key = pressed(mix, 2, unit, evictable=3)
    lease, prefetch = fetch(rig, key)
    assert prefetch.num_fetching == 5
    assert rig.manager.counters.fetched == {Fit.TRUNCATED: 1}
    rig.run()
    rig.manager.release(lease)
    assert_all_back(rig, 0)


@pytest.mark.parametrize("unit", UNITS)
def test_allocation_after_truncation_may_fail_too_c12(
    mix: str, unit: UnitKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, key = pressed(mix, 5, unit)
    asked: list[int] = []

    def refuse(sizes: list[tuple[int, int]], *_: object) -> None:
        asked.append(sizes[0][1])

    monkeypatch.setattr(rig.manager._core, "reserve_all", refuse)
    lease, prefetch = fetch(rig, key)
    assert asked == [WANTED, 5]
    assert prefetch.declined is Decline.ALLOCATION_FAILED
    monkeypatch.undo()
    rig.manager.release(lease)
    assert_all_back(rig, 5)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("free", [THRESHOLD, 5, WANTED])
def test_truncation_changes_neither_anchor_nor_keys_c13(
    mix: str, unit: UnitKind, free: int
) -> None:
    rig, key = pressed(mix, free, unit)
    lease, prefetch = fetch(rig, key)
    commands = rig.take_all(Fetch)
    assert prefetch.first == 2
    scratch = PrefixKey(rig.namespace, key.tokens)
    starts = {"full": 2, "window": free, "recurrent": 1 + free}
    assert {c.component: c.keys for c in commands} == {
        part: scratch.page_keys(starts[part], 2 + free) for part in rig.parts
    }
    for command in commands:
        rig.answer(command)
    tree = rig.manager._core.tree
    nodes = tree.walk(key).nodes
    assert nodes[0].end == 2
    assert b"".join(n.page_keys or b"" for n in nodes) == scratch.page_keys(0, 2 + free)
    rig.manager.release(lease)


@pytest.mark.parametrize("unit", UNITS)
def test_prefetched_prefix_is_found_again_and_can_be_split_c2(unit: UnitKind) -> None:
    rig = Rig(unit=unit)
    base = tokens_for(6, seed=1, unit=unit)
    rig.cache_in_store(rig.key(base))
    lease, _ = fetch(rig, rig.key(base))
    rig.run()
    rig.manager.admit(lease)
    assert rig.matched(rig.key(base)) == (0, 6)
    rig.manager.release(lease)
    for n in (4, 1):
        branch = rig.key(base[: n * PAGE + unit.overlap] + tokens_for(2, seed=n, unit=unit))
        assert rig.matched(branch) == (0, n)
        rig.cache(branch)
        rig.manager.flush(Tier.DEVICE)
        assert rig.matched(branch)[1] >= n
    assert rig.matched(rig.key(base)) == (0, 6)


def test_probe_events_and_store_use_the_same_keys_c2() -> None:
    rig = Rig(unit=UnitKind.PAIR, event_buffer=100)
    key = rig.doc(5, seed=1)
    rig.cache(key)
    events = rig.manager.events.take().events
    wanted = PrefixKey(rig.namespace, key.tokens).page_keys()
    assert {(e.tier, e.keys) for e in events} == {(t, wanted) for t in ("device", "host", "store")}
    assert rig.stored == {"full": set(split_keys(wanted))}
    rig.manager.flush(Tier.DEVICE)
    rig.manager.flush(Tier.HOST)
    lease = rig.acquire(rig.doc(5, seed=1))
    rig.manager.prefetch(lease)
    rig.step()
    asked = [probe.queries[0] for probe in answered_probes(rig)]
    assert b"".join(asked) == wanted
    rig.manager.release(lease)


def answered_probes(rig: Rig) -> list[Probe]:
    """Answer the probe, and those that follow."""
    probes = []
    while rig.has(Probe):
        probes.append(rig.take(Probe))
        rig.answer(probes[-1])
    return probes


def test_probes_of_a_step_go_out_as_one_command() -> None:
    rig = Rig()
    leases = [rig.acquire(rig.doc(4, seed=s)) for s in range(3)]
    for lease in leases:
        rig.manager.prefetch(lease)
    rig.step()
    assert len(rig.take(Probe).queries) == 3
    for lease in leases:
        rig.manager.release(lease)


def test_matched_prefix_is_not_asked_for_again() -> None:
    rig = Rig()
    base = tokens_for(6, seed=1)
    rig.cache(rig.key(base[: 2 * PAGE]))
    key = rig.key(base)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.step()
    assert rig.take(Probe).queries == [PrefixKey(rig.namespace, base).page_keys(2, 3)]
    rig.manager.release(lease)


def test_hit_length_can_be_asked_for_alone_and_fetched_later() -> None:
    rig = Rig()
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    query = rig.manager.prefetch(lease, fetch=False)
    rig.run()
    assert (query.state, query.num_hit) == (PrefetchState.PROBED, 6)
    assert rig.free(Tier.HOST) == 64
    assert rig.manager.ready(lease)
    assert rig.manager.prefetch(lease) is query
    rig.step()
    assert not rig.has(Probe)  # it is known already
    rig.run()
    assert rig.manager.admit(lease) == 6
    rig.manager.release(lease)


def test_hit_lengths_of_a_step_are_asked_with_its_probes() -> None:
    rig = Rig()
    asking, fetching = rig.acquire(rig.doc(4, seed=1)), rig.acquire(rig.doc(4, seed=2))
    query = rig.manager.prefetch(asking, fetch=False)
    rig.manager.prefetch(fetching)
    rig.step()
    rig.answer(rig.take(Probe))
    assert query.num_hit == 0
    for lease in (asking, fetching):
        rig.manager.release(lease)
    assert query.state is PrefetchState.DONE


def test_engine_that_sleeps_is_woken_for_the_prefetch_timeout() -> None:
    rig = Rig(prefetch={"base_timeout_s": 1.0, "timeout_per_1024_tokens_s": 0.0})
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, _ = fetch(rig, key)
    assert rig.manager.next_wakeup() == 1.0
    rig.now = rig.manager.next_wakeup() or 0.0
    assert rig.manager.ready(lease)
    rig.manager.release(lease)
    rig.run()


def test_no_wakeup_for_a_timeout_that_does_not_apply() -> None:
    rig = Rig(prefetch={"policy": PrefetchPolicy.WAIT_COMPLETE, "base_timeout_s": 1.0})
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, _ = fetch(rig, key)
    deadline = rig.manager.operations.next_deadline()
    assert rig.manager.next_wakeup() == deadline
    rig.manager.release(lease)
    rig.run()


# ---- policies -----------------------------------------------------------------------------------


class Fetching(NamedTuple):
    """A fetch of six pages of which two have come. With full attention alone they are of use; of
    several components all must have come."""

    rig: Rig
    key: PrefixKey
    lease: Lease
    command: Fetch
    others: list[Fetch]
    landed: int

    def end(self, status: PageStatus) -> None:
        """The rest ends like this."""
        for other in self.others:
            self.rig.answer(other, statuses=[status] * num_pages(other.host))
        self.rig.step(self.rig.reports(self.command, statuses=[status] * 4, first=2))


def fetching(mix: str, policy: PrefetchPolicy) -> Fetching:
    rig = Rig(
        mix=mix,
        prefetch={
            "policy": policy,
            "base_timeout_s": 1.0,
            "max_timeout_s": 3.0,
            "timeout_per_1024_tokens_s": 128.0,
        },
    )
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, _ = fetch(rig, key)
    command = rig.take(Fetch)
    rig.step(rig.reports(command, statuses=[OK, OK], final=False))
    others = rig.take_all(Fetch)
    return Fetching(rig, key, lease, command, others, landed=2 if mix == "full" else 0)


def test_best_effort_starts_with_what_has_arrived_c14(mix: str) -> None:
    begun = fetching(mix, PrefetchPolicy.BEST_EFFORT)
    rig, lease, landed = begun.rig, begun.lease, begun.landed
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == landed
    rig.step()
    assert rig.take(Cancel).op == begun.command.op
    rig.step(rig.reports(begun.command, statuses=[OK, OK], first=2, final=False))  # too late
    assert rig.matched(begun.key) == (0, landed)
    # The rest may still be written to; what has come and is of no use alone is free.
    assert rig.free(Tier.HOST) == (58 if mix == "full" else 60)
    begun.end(PageStatus.CANCELLED)
    assert rig.matched(begun.key) == (0, landed)
    assert_all_back(rig, 64 - landed)
    rig.manager.release(lease)


def test_wait_complete_waits_for_the_last_page_c14(mix: str) -> None:
    begun = fetching(mix, PrefetchPolicy.WAIT_COMPLETE)
    rig, lease = begun.rig, begun.lease
    rig.now += 7.0
    rig.step()
    assert not rig.manager.ready(lease)
    begun.end(OK)
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == 6
    rig.manager.release(lease)


def test_wait_complete_ends_when_the_worker_never_answers_c14(mix: str) -> None:
    begun = fetching(mix, PrefetchPolicy.WAIT_COMPLETE)
    rig, lease = begun.rig, begun.lease
    rig.now += 1000.0
    rig.step()
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == begun.landed
    assert rig.manager.counters.overdue_operations == 1
    rig.manager.release(lease)
    begun.end(OK)
    assert_all_back(rig, 64 - begun.landed)


def test_timeout_is_base_plus_per_tokens_and_capped_c14(mix: str) -> None:
    begun = fetching(mix, PrefetchPolicy.TIMEOUT)
    rig, lease = begun.rig, begun.lease
    # 6 pages × 4 tokens: 1 + 128 × 24/1024 = 4 s, capped to 3
    rig.now += 2.9
    assert not rig.manager.ready(lease)
    rig.now += 0.2
    assert rig.manager.ready(lease)
    assert rig.manager.config.prefetch.timeout_s(8) == pytest.approx(2.0)
    rig.manager.release(lease)
    begun.end(MISS)
    assert_all_back(rig, 64 - begun.landed)


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_abort_in_mid_fetch_returns_everything_c14(mix: str, policy: PrefetchPolicy) -> None:
    begun = fetching(mix, policy)
    begun.rig.manager.release(begun.lease)
    begun.rig.manager.check_invariants()
    begun.end(PageStatus.CANCELLED)
    assert sum(begun.rig.used(Tier.HOST).values()) == begun.landed
    assert_all_back(begun.rig, 64 - begun.landed)


def test_abort_while_probing_ignores_the_answer_c14(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    probes = rig.take_all(Probe)
    rig.manager.release(lease)
    for probe in probes:
        rig.answer(probe)
    assert prefetch.state is PrefetchState.DONE
    assert not rig.has(Fetch)
    assert rig.free(Tier.HOST) == 64
    assert rig.manager._core.tree.roots == {}


# ---- budget and cost ----------------------------------------------------------------------------


def test_budget_counts_pages_reserved_and_a_long_prompt_leaves_room_c15(mix: str) -> None:
    rig = Rig(mix=mix, host=40, prefetch={"max_inflight_share": 0.5})
    long, short = rig.doc(100, seed=1), rig.doc(4, seed=2)
    rig.cache_in_store(long, points=range(1, 101))
    rig.cache_in_store(short)
    first, prefetch = fetch(rig, long)
    assert prefetch.num_fetching == 20  # half of the host, not the hundred it asked for
    second, waiting = fetch(rig, short)
    assert waiting.state is PrefetchState.WAITING  # there will be a budget again
    rig.answer_all(Fetch)
    assert waiting.num_fetching == 4
    for lease in (first, second):
        rig.manager.release(lease)
    rig.run()
    assert rig.inflight_pages == 0


def test_cold_long_prompt_reserves_nothing_c15(mix: str) -> None:
    rig = Rig(mix=mix, host=40)
    lease = rig.acquire(rig.doc(500, seed=1))
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    assert rig.free(Tier.HOST) == 40  # a probe holds no page
    rig.run()
    assert prefetch.declined is Decline.SHORT_HIT
    rig.manager.release(lease)


@pytest.mark.parametrize(("paces", "is_fetched"), [([0.01], True), ([1.0], False), ([], False)])
def test_of_several_stores_it_counts_in_which_a_prefix_lies(
    paces: list[float], is_fetched: bool
) -> None:
    rig = Rig()
    first, other = rig.doc(4, seed=1), rig.doc(4, seed=2)
    rig.cache_in_store(first)
    rig.cache_in_store(other)
    lease, _ = fetch(rig, first)
    rig.now += 4.0  # a second per page, computed in a tenth
    rig.run()
    rig.manager.release(lease)
    rig.manager.costs.observe_prefill(num_tokens=4 * PAGE, seconds=0.4)
    lease = rig.acquire(other)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    for _ in range(2):  # one page, then the others
        probe = rig.take(Probe)
        hits = len(probe.queries[0]) // PAGE_KEY_BYTES
        rig.step([Probed(probe.op, 0, "full", [hits], paces=paces)])
    assert (prefetch.declined is None) is is_fetched


def test_slow_store_is_not_asked_when_recomputing_is_faster() -> None:
    rig = Rig()
    slow, other = rig.doc(4, seed=1), rig.doc(4, seed=2)
    rig.cache_in_store(slow)
    rig.cache_in_store(other)
    lease, _ = fetch(rig, slow)
    rig.now += 4.0  # a second per page
    rig.run()
    rig.manager.release(lease)
    rig.manager.costs.observe_prefill(num_tokens=1000, seconds=0.1)
    lease, prefetch = fetch(rig, other)
    assert prefetch.declined is Decline.SLOWER_THAN_RECOMPUTE
    rig.manager.release(lease)
    for _ in range(15):
        lease, prefetch = fetch(rig, other)
        rig.manager.release(lease)
    assert prefetch.num_fetching == 4  # now and then it is tried again: stores recover
    rig.run()


def test_cost_model_can_be_switched_off() -> None:
    rig = Rig(prefetch={"cost_model": False})
    key = rig.doc(4, seed=1)
    rig.cache_in_store(key)
    rig.manager.costs.observe_fetch(1, 100.0)
    rig.manager.costs.observe_prefill(num_tokens=1000, seconds=0.1)
    lease, prefetch = fetch(rig, key)
    assert prefetch.num_fetching == 4
    rig.run()
    rig.manager.release(lease)


@pytest.mark.parametrize(
    ("options", "pages", "reason"),
    [
        ({"store": False}, 4, Decline.NO_STORE),
        ({"store": False, "host": 0}, 4, Decline.NO_HOST),
        ({}, 1, Decline.BELOW_THRESHOLD),
    ],
)
def test_each_decline_has_its_reason(
    options: dict[str, object], pages: int, reason: Decline
) -> None:
    rig = Rig(**options)  # type: ignore[arg-type]
    lease = rig.acquire(rig.doc(pages, seed=1))
    assert rig.manager.prefetch(lease).declined is reason
    assert rig.manager.ready(lease)
    assert rig.manager.counters.declined[reason] == 1
    rig.manager.release(lease)


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS)
@pytest.mark.parametrize(
    "status", [s for s in PageStatus if s is not OK], ids=lambda s: s.name.lower()
)
def test_any_page_fault_ends_as_a_miss_and_later_requests_work_c17(
    mix: str, part: str, status: PageStatus
) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, prefetch = fetch(rig, key)
    bad = {"full": [OK, OK, OK, status, OK, OK], "window": [OK, status], "recurrent": [status]}
    rig.answer_all(Fetch, part, statuses=bad[part])
    landed = 3 if mix == "full" else 0
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == landed
    assert rig.manager.counters.fetch_missed_pages == 6 - landed
    assert rig.manager.counters.faults[f"fetch:{status.name.lower()}"] == 1
    assert_all_back(rig, 64 - landed)
    assert sum(rig.used(Tier.HOST).values()) == landed
    rig.manager.release(lease)
    again, second = fetch(rig, key)
    rig.run()
    assert rig.manager.admit(again) == 6
    rig.manager.release(again)


def test_nonsense_from_a_worker_is_a_miss_not_a_crash_c17(mix: str) -> None:
    from quire.messages import Transferred

    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    probe = rig.take(Probe)
    rig.answer_all(Probe)
    rig.step([Probed(probe.op, 0, "full", [1, 2, 3])])
    assert prefetch.declined is Decline.PROBE_FAILED
    rig.step(
        [Probed(probe.op, 0, "full", [6]), Transferred(OperationId(999), 0, "full", 0, b"\0", True)]
    )
    assert rig.manager.counters.late_reports == 2
    rig.manager.release(lease)


def test_fetched_pages_that_were_computed_meanwhile_are_duplicates_c6() -> None:
    rig = Rig()
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, prefetch = fetch(rig, key)
    command = rig.take(Fetch)
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer(rig.take(Backup))
    rig.answer(command)
    assert rig.manager.counters.duplicate_pages == 6
    assert rig.free(Tier.HOST) == 58
    rig.manager.release(lease)
    rig.manager.check_invariants()
