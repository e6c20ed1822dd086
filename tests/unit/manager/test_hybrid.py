"""Windows and recurrent states beside full attention (C19–C23)."""

from __future__ import annotations

import pytest

from quire.components import PoolSize
from quire.config import SnapshotConfig
from quire.keys import PrefixKey
from quire.manager import Decline, Fit, Lease, Prefetch
from quire.manager.states import WorkingState
from quire.messages import Fetch, Load, Probe, Probed
from quire.types import NO_SLOT, PageIds, Tier, num_pages, page_array
from support import FAILED, MIX_PARTS, MIXES, WINDOW_PAGES, Rig, tokens_for

HYBRIDS = MIXES[1:]
RECURRENT = [mix for mix in HYBRIDS if "recurrent" in mix]
WINDOWED = [mix for mix in HYBRIDS if "window" in mix]
OTHER_PARTS = [(mix, part) for mix, part in MIX_PARTS if part != "full"]


def branch_of(rig: Rig, key: PrefixKey, point: int, *, pages: int = 2, seed: int = 77) -> PrefixKey:
    """A key that shares `point` pages with another."""
    return rig.key([*key[:point].tokens.tolist(), *tokens_for(pages, seed=seed)])


def matched_at(rig: Rig, key: PrefixKey) -> list[int]:
    """Device pages matched by every prefix of a key."""
    return [rig.matched(key[:end])[0] for end in range(key.num_pages + 1)]


def working(lease: Lease) -> WorkingState:
    assert lease.state is not None
    assert lease.state.recurrent is not None
    return lease.state.recurrent


def finish(rig: Rig, lease: Lease) -> None:
    rig.manager.release(lease)
    rig.run()


def assert_empty(rig: Rig) -> None:
    for tier in Tier:
        assert not any(rig.used(tier).values())
    assert rig.manager._core.tree.roots == {}


# ---- C19: where a match ends --------------------------------------------------------------------


def test_match_ends_at_the_deepest_page_where_all_are_satisfied_c19() -> None:
    rig = Rig(mix="full+window+recurrent", store=False)
    key = rig.doc(9, seed=1)
    for turn in (3, 6, 9):
        rig.cache(key[:turn])
    assert matched_at(rig, key) == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_window_needs_only_its_trailing_window_c19() -> None:
    rig = Rig(mix="full+window", store=False)
    key = rig.doc(8, seed=1)
    rig.cache(key)
    held_from = 8 - rig.kept_window
    expected = [end if end - WINDOW_PAGES >= held_from else 0 for end in range(9)]
    assert expected[-1] == 8
    assert matched_at(rig, key) == expected


def test_any_boundary_with_a_complete_window_will_do_c19() -> None:
    rig = Rig(mix="full+window", window_pages=8, store=False)
    key = rig.doc(8, seed=1)
    rig.cache(key)
    assert matched_at(rig, key) == list(range(9))


def test_recurrent_needs_a_snapshot_exactly_there_c19() -> None:
    rig = Rig(mix="full+recurrent", store=False)
    key = rig.doc(8, seed=1)
    rig.cache(key)
    assert matched_at(rig, key) == [0] * 8 + [8]
    assert rig.matched(rig.key([*key.tokens.tolist(), *tokens_for(3, seed=2)])) == (8, 0)


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_components_may_lie_in_different_tiers_and_only_what_lacks_is_loaded_c19(
    mix: str, part: str
) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    rig.cache(key)
    rig.manager.flush(Tier.DEVICE, part)
    assert rig.matched(key) == (0, 6)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 6
    rig.step()
    load = rig.take(Load, part)
    assert not rig.has(Load)
    rig.answer(load)
    assert rig.matched(key) == (6, 0)
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
def test_match_is_the_same_when_asked_again_and_after_a_split_c19(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(8, seed=1)
    for turn in (3, 8):
        rig.cache(key[:turn])
    before = matched_at(rig, key)
    rig.manager.release(rig.acquire(branch_of(rig, key, 5)))
    lease = rig.acquire(key[:7])
    assert matched_at(rig, key) == before
    finish(rig, lease)


# ---- C20: recurrent state is copied on write, and saved where it will be needed -----------------


@pytest.mark.parametrize("mix", RECURRENT)
def test_leases_branching_from_one_snapshot_have_slots_of_their_own_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache(key)
    leases = [rig.acquire(branch_of(rig, key, 4, seed=seed)) for seed in (2, 3)]
    written: list[int] = []
    for lease in leases:
        assert lease.num_device == 4
        assert rig.manager.begin(lease)
        assert rig.manager.begin(lease)  # once is enough
        written += [working(lease).slot, rig.manager.save_slot(lease)]
    snapshots = [working(lease).restore for lease in leases]
    assert snapshots[0] == snapshots[1] != NO_SLOT
    assert len({*written, *snapshots}) == 5  # all different, and the snapshot's not among them
    for lease in leases:
        finish(rig, lease)
    assert rig.used(Tier.DEVICE)["recurrent"] == 1


@pytest.mark.parametrize("mix", RECURRENT)
def test_shared_snapshot_is_never_given_out_to_be_written_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(8, seed=1)
    lease = rig.acquire(key)
    assert rig.manager.begin(lease)
    for end in range(1, 9):
        slot = rig.manager.save_slot(lease)
        assert slot not in snapshots_of(rig, key)
        assert rig.manager.extend(lease, 1)
        assert rig.manager.cover(lease, end)
        rig.manager.saved(lease, end)
        rig.manager.commit(lease, key[:end])
    assert len(snapshots_of(rig, key)) == 1
    assert working(lease).slot not in snapshots_of(rig, key)
    finish(rig, lease)


def snapshots_of(rig: Rig, key: PrefixKey) -> list[int]:
    """Device slots of the snapshots along a key."""
    slot, found = rig.slot("recurrent", Tier.DEVICE), list[int]()
    for node in rig.manager._core.tree.walk(key).nodes:
        holding = node.held[slot]
        found += page_array(holding.pages if holding is not None else PageIds(b"")).tolist()
    return found


@pytest.mark.parametrize("mix", RECURRENT)
def test_two_requests_at_one_checkpoint_leave_one_snapshot_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    first, second = rig.acquire(key), rig.acquire(key)
    for lease in (first, second):
        assert rig.grow(lease, key)
    assert len(snapshots_of(rig, key)) == 1
    assert rig.manager.counters.snapshots == 1
    for lease in (first, second):
        finish(rig, lease)
    assert rig.used(Tier.DEVICE) == rig.used(Tier.HOST)
    assert rig.used(Tier.DEVICE)["recurrent"] == 1


@pytest.mark.parametrize("mix", RECURRENT)
def test_snapshot_that_is_being_loaded_is_not_replaced_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    late = rig.acquire(key)  # will compute what the other loads
    early = rig.acquire(key)
    assert rig.manager.load(early) == 4
    rig.step()
    loads = rig.take_all(Load)
    assert rig.grow(late, key)
    assert late.num_device == 0  # what is on its way can be neither shared nor replaced
    for load in loads:
        rig.answer(load)
    assert rig.manager.commit(late, key) == 4
    assert late.pages == early.pages
    assert rig.matched(key) == (4, 0)
    for lease in (late, early):
        finish(rig, lease)
    assert rig.used(Tier.DEVICE)["recurrent"] == 1


@pytest.mark.parametrize("mix", RECURRENT)
def test_snapshots_are_saved_at_the_ends_of_prompt_and_turn_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(7, seed=1)
    prompt = key[:4]
    lease = rig.compute(prompt)
    assert rig.matched(key) == (4, 0)  # while the request still runs
    assert rig.grow(lease, key)
    assert rig.matched(key) == (4, 0)  # an answer is no checkpoint before its end
    finish(rig, lease)
    assert matched_at(rig, key) == [0, 0, 0, 0, 4, 4, 4, 7]
    assert rig.manager.counters.snapshots == 2


@pytest.mark.parametrize("mix", RECURRENT)
def test_end_of_turn_is_where_the_state_was_saved_last_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(8, seed=1)
    lease = rig.compute(key[:3])
    assert rig.grow(lease, key[:5])
    assert rig.grow(lease, key, save=False)
    finish(rig, lease)
    # A window moves on with its request: where it is gone, the state alone is of no use.
    end = 3 if "window" in mix else 5
    assert matched_at(rig, key) == [0, 0, 0, 3, 3, end, end, end, end]
    assert rig.used(Tier.DEVICE)["full"] == end  # what lies behind cannot be reached
    assert rig.used(Tier.DEVICE)["recurrent"] == (1 if "window" in mix else 2)


@pytest.mark.parametrize("mix", RECURRENT)
def test_state_asked_to_be_saved_but_never_there_is_no_snapshot_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(4, seed=1)
    lease = rig.acquire(key)
    assert rig.grow(lease, key, save=False)
    assert rig.manager.save_slot(lease) != NO_SLOT
    finish(rig, lease)  # before the batch has ended
    assert_empty(rig)


@pytest.mark.parametrize("mix", RECURRENT)
def test_branch_point_seen_by_an_earlier_match_is_saved_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    base = rig.doc(6, seed=1)
    rig.cache(base)
    second, third = branch_of(rig, base, 3, seed=2), branch_of(rig, base, 3, seed=3)
    lease = rig.acquire(second)
    assert lease.num_device == 0  # nothing to go on from
    assert rig.manager.next_stop(lease, 0, 5) == 3
    assert rig.manager.next_stop(lease, 3, 5) == 5
    assert rig.grow(lease, second)
    finish(rig, lease)
    assert rig.matched(third) == rig.matched(base[:5]) == (3, 0)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(third) == (0, 3)


@pytest.mark.parametrize("mix", RECURRENT)
def test_branch_that_is_expected_is_saved_by_the_request_that_runs_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    lease = rig.acquire(key)
    rig.manager.expect_branch(lease, 2)
    assert rig.manager.next_stop(lease, 0, 6) == 2
    assert rig.grow(lease, key)
    assert rig.matched(branch_of(rig, key, 2)) == (2, 0)
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
def test_chunks_stop_only_where_a_state_is_to_be_saved_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False, snapshots=SnapshotConfig(every_pages=3))
    lease = rig.acquire(rig.doc(8, seed=1))
    stops = [rig.manager.next_stop(lease, first, 20) for first in range(9)]
    expected = [3, 3, 3, 6, 6, 6, 8, 8, 9] if "recurrent" in mix else [20] * 9
    assert stops == expected
    finish(rig, lease)


@pytest.mark.parametrize("mix", RECURRENT)
def test_snapshots_every_so_many_pages_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False, snapshots=SnapshotConfig(every_pages=2))
    key = rig.doc(5, seed=1)
    rig.cache(key)
    assert matched_at(rig, key) == [0, 0, 2, 2, 4, 5]


@pytest.mark.parametrize("mix", RECURRENT)
@pytest.mark.parametrize("per_path", [1, 2, 3])
def test_path_keeps_only_so_many_snapshots_and_the_newest_is_one_c20(
    mix: str, per_path: int
) -> None:
    rig = Rig(mix=mix, store=False, snapshots=SnapshotConfig(every_pages=1, per_path=per_path))
    key = rig.doc(8, seed=1)
    rig.cache(key)
    for tier in Tier:
        assert rig.used(tier)["recurrent"] == per_path
    assert rig.matched(key) == (8, 0)
    assert rig.manager.counters.snapshots_over_budget == 8 - per_path


@pytest.mark.parametrize("mix", RECURRENT)
def test_forks_keep_their_snapshot_before_others_c20(mix: str) -> None:
    rig = Rig(mix=mix, store=False, snapshots=SnapshotConfig(every_pages=1, per_path=2))
    key = rig.doc(8, seed=1)
    rig.cache_with_point(key[:3], 2)
    rig.cache(key)
    assert matched_at(rig, key) == [0, 0, 2, 2, 2, 2, 2, 2, 8]


@pytest.mark.parametrize("mix", WINDOWED)
@pytest.mark.parametrize("arrives", [True, False])
def test_window_on_its_way_is_neither_shared_nor_replaced_c20(mix: str, arrives: bool) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    late = rig.acquire(key)  # before there is anything: it computes all of it
    rig.cache(key)
    rig.manager.flush(Tier.DEVICE, "window")
    early = rig.acquire(key)
    assert rig.manager.load(early) == 6
    rig.step()
    load = rig.take(Load, "window")
    assert rig.grow(late, key)
    assert late.num_device == 6 - num_pages(load.device)  # its full pages are there, of no use yet
    rig.answer(load, statuses=None if arrives else FAILED)
    if not arrives:
        assert rig.manager.commit(late, key) == 0
        rig.manager.release(early)
    assert rig.manager.commit(late, key) == num_pages(load.device)
    assert late.num_device == 6
    if arrives:
        assert late.state is not None
        assert late.state.window is not None
        assert load.device.endswith(late.state.window.pages)
        rig.manager.release(early)
    finish(rig, late)
    assert rig.matched(key) == (6, 0)
    assert rig.used(Tier.DEVICE) == rig.used(Tier.HOST)


# ---- C21: a fetched prefix is published with all its components or not at all -------------------


def fetching(rig: Rig, key: PrefixKey) -> tuple[Lease, Prefetch]:
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    rig.answer_all(Probe)
    return lease, prefetch


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_fetch_that_lacks_a_component_offers_nothing_beyond_what_was_there_c21(
    mix: str, part: str
) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(7, seed=1)
    rig.cache_on_host(key[:3])
    before = rig.used(Tier.HOST)
    rig.cache_in_store(key)
    lease, prefetch = fetching(rig, key)
    rig.answer_all(Fetch, part, statuses=FAILED)
    assert (prefetch.num_fetching, prefetch.num_landed) == (4, 0)
    assert rig.manager.admit(lease) == 3
    assert rig.matched(key) == (0, 3)
    assert rig.used(Tier.HOST) == before
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
@pytest.mark.parametrize("last", range(3))
def test_nothing_is_offered_before_the_last_component_has_come_c21(mix: str, last: int) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, _ = fetching(rig, key)
    fetches = rig.take_all(Fetch)
    fetches.append(fetches.pop(last % len(fetches)))
    for fetch in fetches:
        assert rig.matched(key) == (0, 0)
        assert not rig.manager.ready(lease)
        rig.answer(fetch)
    assert rig.matched(key) == (0, 6)
    assert rig.manager.admit(lease) == 6
    assert rig.manager.load(lease) == 6
    rig.run()
    assert rig.matched(key) == (6, 0)
    finish(rig, lease)


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_store_without_any_state_is_declined_with_its_reason_c21(mix: str, part: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    rig.stored[part].clear()
    lease, prefetch = fetching(rig, key)
    assert prefetch.declined is Decline.NO_STATE
    assert not rig.has(Fetch)
    finish(rig, lease)
    assert_empty(rig)


@pytest.mark.parametrize("mix", HYBRIDS)
def test_fetch_ends_at_the_deepest_point_the_store_has_state_for_c21(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(8, seed=1)
    rig.cache_in_store(key, points=[3, 5])
    lease, prefetch = fetching(rig, key)
    assert (prefetch.num_hit, prefetch.num_fetching) == (5, 5)
    fetches = {fetch.component: fetch for fetch in rig.take_all(Fetch)}
    starts = {"full": 0, "window": 3, "recurrent": 4}
    for part, fetch in fetches.items():
        assert fetch.keys == PrefixKey(rig.namespace, key.tokens).page_keys(starts[part], 5)
        rig.answer(fetch)
    assert rig.matched(key) == (0, 5)
    finish(rig, lease)


@pytest.mark.parametrize(
    "present", [[], [b""], [b"\1"], [b"\1" * 100], [b"\1" * 6, b"\1" * 6]], ids=len
)
def test_nonsense_about_states_is_a_miss_not_a_crash_c21(present: list[bytes]) -> None:
    rig = Rig(mix="full+recurrent")
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.step()
    probe = rig.take(Probe, "recurrent")
    rig.answer_all(Probe)
    rig.step([Probed(probe.op, 0, "recurrent", present=present)])
    rig.run()
    assert rig.manager.admit(lease) in (0, 6)
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
def test_fetched_prefix_that_was_computed_meanwhile_is_freed_as_a_duplicate_c21(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease, _ = fetching(rig, key)
    fetches = rig.take_all(Fetch)
    rig.cache(key)
    for fetch in fetches:
        rig.answer(fetch)
    finish(rig, lease)
    kept = {"full": 6, "window": rig.kept_window, "recurrent": 1}
    assert rig.used(Tier.HOST) == {part: kept[part] for part in rig.parts}
    assert rig.matched(key) == (6, 0)


# ---- C22: truncation, and pools that are exhausted ----------------------------------------------

ANCHOR, POINTS, THRESHOLD = 2, (5, 8, 11), 2


def pressed(mix: str, free: int, evictable: int = 0) -> tuple[Rig, PrefixKey]:
    """A host with `free` full pages free and as many single-page leaves as told; the key's first
    pages are there, all of it is in the store, with state at POINTS."""
    rig = Rig(mix=mix, device=200, host=30, threshold_pages=THRESHOLD)
    key = rig.doc(POINTS[-1], seed=1)
    rig.cache_on_host(key[:ANCHOR])
    held = rig.doc(30 - ANCHOR - free - evictable, seed=2)
    rig.cache_on_host(held)
    for seed in range(evictable):
        rig.cache_on_host(rig.doc(1, seed=100 + seed))
    rig.acquire(held)
    rig.empty_store()
    rig.cache_in_store(key, POINTS)
    assert rig.free(Tier.HOST) == free
    return rig, key


@pytest.mark.parametrize("mix", HYBRIDS)
@pytest.mark.parametrize(
    ("free", "evictable", "fit", "end"),
    [
        (9, 0, Fit.EXACT, 11),
        (12, 0, Fit.EXACT, 11),
        (0, 9, Fit.EVICTED, 11),
        (4, 6, Fit.EVICTED, 11),
        (8, 0, Fit.TRUNCATED, 8),
        (6, 0, Fit.TRUNCATED, 8),
        (5, 0, Fit.TRUNCATED, 5),
        (3, 0, Fit.TRUNCATED, 5),
        (1, 5, Fit.TRUNCATED, 8),
        (2, 0, None, 0),
        (0, 0, None, 0),
    ],
)
def test_truncated_prefetch_moves_to_a_point_before_the_cut_c22(
    mix: str, free: int, evictable: int, fit: Fit | None, end: int
) -> None:
    rig, key = pressed(mix, free, evictable)
    before = rig.used(Tier.HOST)
    lease, prefetch = fetching(rig, key)
    if fit is None:
        assert prefetch.declined is Decline.HOST_FULL
        assert rig.inflight_pages == 0
        finish(rig, lease)
        assert rig.used(Tier.HOST) == before
        return
    assert rig.manager.counters.fetched == {fit: 1}
    assert rig.inflight_pages == prefetch.num_fetching == end - ANCHOR
    assert prefetch.first == ANCHOR
    fetches = {fetch.component: fetch for fetch in rig.take_all(Fetch)}
    starts = {"full": ANCHOR, "window": end - WINDOW_PAGES, "recurrent": end - 1}
    for part, fetch in fetches.items():
        assert fetch.keys == PrefixKey(rig.namespace, key.tokens).page_keys(starts[part], end)
        rig.answer(fetch)
    assert rig.manager.admit(lease) == end
    assert rig.matched(key) == (0, end)
    assert rig.inflight_pages == 0
    finish(rig, lease)
    gone = 0 if fit is Fit.EXACT else min(evictable, 9 - free)
    grown = {"full": end - ANCHOR, "window": 2 if "recurrent" in mix else 0, "recurrent": 1}
    assert rig.used(Tier.HOST) == {p: n - gone + grown[p] for p, n in before.items()}
    assert rig.manager.idle


@pytest.mark.parametrize("mix", HYBRIDS)
def test_truncated_prefetch_that_fails_gives_everything_back_c22(mix: str) -> None:
    rig, key = pressed(mix, free=6)
    before = rig.used(Tier.HOST)
    lease, _ = fetching(rig, key)
    while rig.has(Fetch):  # the state of a nearer point is tried as well
        rig.answer_all(Fetch, rig.parts[-1], statuses=FAILED)
    assert rig.manager.admit(lease) == ANCHOR
    assert rig.inflight_pages == 0
    assert rig.used(Tier.HOST) == before
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
@pytest.mark.parametrize(("budget", "end"), [(11, 11), (10, 8), (8, 8), (7, 5), (5, 5), (4, 0)])
def test_budget_cuts_to_a_point_too_c22(mix: str, budget: int, end: int) -> None:
    rig = Rig(mix=mix, host=100, prefetch={"max_inflight_share": budget / 100})
    key = rig.doc(POINTS[-1], seed=1)
    rig.cache_in_store(key, POINTS)
    lease, prefetch = fetching(rig, key)
    assert rig.inflight_pages == prefetch.num_fetching == end
    assert (prefetch.declined is Decline.BUDGET) == (end == 0)
    rig.run()  # the rest follows when there is a budget again
    assert rig.manager.admit(lease) == (POINTS[-1] if end else 0)
    assert rig.inflight_pages == 0
    finish(rig, lease)


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_no_slot_left_on_the_host_is_a_decline_c22(mix: str, part: str) -> None:
    size = 1 if part == "recurrent" else 3
    rig = Rig(mix=mix, pools={part: PoolSize(64, size)})
    held, key = rig.doc(6, seed=1), rig.doc(6, seed=2)
    rig.cache_on_host(held)
    user = rig.acquire(held)
    before = rig.used(Tier.HOST)
    assert before[part] == size
    rig.cache_in_store(key)
    lease, prefetch = fetching(rig, key)
    assert prefetch.declined is Decline.NO_SLOT
    assert rig.manager.counters.declined == {Decline.NO_SLOT: 1}
    assert rig.used(Tier.HOST) == before
    assert rig.inflight_pages == 0
    finish(rig, lease)
    finish(rig, user)
    lease, prefetch = fetching(rig, key)  # now somebody else's may go
    assert rig.manager.counters.fetched == {Fit.EVICTED: 1}
    rig.run()
    assert rig.manager.admit(lease) == 6
    assert rig.matched(held) == (0, 0)
    finish(rig, lease)
    assert rig.used(Tier.HOST)["full"] == 6  # no dead weight


@pytest.mark.parametrize("mix", RECURRENT)
def test_no_slot_left_on_the_device_makes_a_request_wait_c22(mix: str) -> None:
    rig = Rig(mix=mix, store=False, pools={"recurrent": PoolSize(2, 8)})
    first, second, third = (rig.acquire(rig.doc(3, seed=seed)) for seed in range(3))
    assert rig.manager.begin(first)
    assert rig.manager.begin(second)
    assert not rig.manager.begin(third)
    assert rig.used(Tier.DEVICE)["recurrent"] == 2
    finish(rig, first)
    assert rig.manager.begin(third)
    finish(rig, second)
    finish(rig, third)


@pytest.mark.parametrize("mix", RECURRENT)
def test_snapshot_nobody_stands_on_makes_room_for_a_request_c22(mix: str) -> None:
    rig = Rig(mix=mix, store=False, pools={"recurrent": PoolSize(2, 8)})
    key = rig.doc(3, seed=1)
    rig.cache(key)
    first, second = rig.acquire(rig.doc(3, seed=2)), rig.acquire(rig.doc(3, seed=3))
    assert rig.manager.begin(first)
    assert rig.manager.begin(second)
    assert rig.matched(key) == (0, 3)  # the host has it still
    finish(rig, first)
    finish(rig, second)


@pytest.mark.parametrize("mix", RECURRENT)
def test_no_slot_to_save_into_costs_the_snapshot_only_c22(mix: str) -> None:
    rig = Rig(mix=mix, store=False, pools={"recurrent": PoolSize(1, 8)})
    key = rig.doc(3, seed=1)
    lease = rig.acquire(key)
    assert rig.grow(lease, key)
    assert rig.manager.save_slot(lease) == NO_SLOT
    assert rig.manager.counters.snapshots_skipped == 2
    assert lease.num_device == 3
    finish(rig, lease)
    assert_empty(rig)


@pytest.mark.parametrize("mix", RECURRENT)
def test_no_slot_to_load_into_leaves_everything_as_it_was_c22(mix: str) -> None:
    rig = Rig(mix=mix, store=False, pools={"recurrent": PoolSize(2, 8)})
    key = rig.doc(4, seed=1)
    rig.cache_on_host(key)
    others = [rig.acquire(rig.doc(3, seed=seed)) for seed in (2, 3)]
    assert all(rig.manager.begin(other) for other in others)
    before = rig.used(Tier.DEVICE)
    lease = rig.acquire(key)
    assert rig.manager.load(lease) == 0
    assert rig.used(Tier.DEVICE) == before
    assert rig.matched(key) == (0, 4)
    for other in others:
        finish(rig, other)
    assert rig.manager.load(lease) == 4
    finish(rig, lease)


@pytest.mark.parametrize("mix", WINDOWED)
def test_no_window_pages_left_changes_nothing_c22(mix: str) -> None:
    rig = Rig(mix=mix, store=False, pools={"window": PoolSize(4, 8)})
    first = rig.compute(rig.doc(3, seed=1))
    second = rig.acquire(rig.doc(3, seed=2))
    before = rig.used(Tier.DEVICE)
    assert not rig.manager.cover(second, 3)
    assert rig.used(Tier.DEVICE) == before
    assert rig.manager.counters.device_allocation_failures == 1
    finish(rig, first)
    assert rig.manager.cover(second, 3)
    finish(rig, second)


# ---- C23: what goes when something else goes ----------------------------------------------------


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS[1:])
@pytest.mark.parametrize("tiers", [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)])
def test_losing_a_component_in_its_last_tier_takes_all_else_along_c23(
    mix: str, part: str, tiers: tuple[Tier, Tier]
) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    rig.cache(key)
    held = rig.used(tiers[0])
    assert held == rig.used(tiers[1])
    assert rig.manager.flush(tiers[0], part) == held[part]
    assert rig.used(tiers[0]) == held | {part: 0}  # the others stay where they are
    assert rig.matched(key) == ((6, 0) if tiers[0] is Tier.HOST else (0, 6))
    assert rig.manager.flush(tiers[1], part) == held[part]
    assert rig.matched(key) == (0, 0)
    assert_empty(rig)


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_what_others_can_go_on_from_stays_c23(mix: str, part: str) -> None:
    """A lease keeps the upper point; without its state the lower end goes, up to that point."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(8, seed=1)
    rig.cache_with_point(key, 3)
    lease = rig.acquire(key[:3])
    for tier in (Tier.HOST, Tier.DEVICE):
        rig.manager.flush(tier, part)
    assert rig.matched(key) == (3, 0)
    for tier in Tier:
        assert rig.used(tier)["full"] == 3
    finish(rig, lease)


@pytest.mark.parametrize("mix", RECURRENT)
def test_snapshot_in_the_middle_of_a_path_takes_nothing_along_c23(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    for turn in (3, 6):
        rig.cache(key[:turn])
    lease = rig.acquire(key)
    for tier in (Tier.HOST, Tier.DEVICE):
        rig.manager.flush(tier, "recurrent")
    assert matched_at(rig, key) == [0, 0, 0, 0, 0, 0, 6]
    assert rig.used(Tier.DEVICE)["full"] == rig.used(Tier.HOST)["full"] == 6
    finish(rig, lease)


@pytest.mark.parametrize("mix", HYBRIDS)
@pytest.mark.parametrize("tier", list(Tier))
def test_what_a_lease_uses_is_not_evicted_c23(mix: str, tier: Tier) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    rig.cache(key)
    if tier is Tier.HOST:
        rig.manager.flush(Tier.DEVICE)
    lease = rig.acquire(key)
    for part in rig.parts:
        rig.manager.flush(tier, part)
    assert sum(rig.matched(key)) == 6
    assert rig.manager.load(lease) == lease.num_device - rig.matched(key)[0]
    rig.run()
    assert rig.matched(key) == (6, 0)
    finish(rig, lease)


@pytest.mark.parametrize(("mix", "part"), OTHER_PARTS)
def test_full_pages_on_the_host_go_with_the_last_state_they_need_c23(mix: str, part: str) -> None:
    size = 1 if part == "recurrent" else 3
    rig = Rig(mix=mix, pools={part: PoolSize(64, size)})
    first, second = rig.doc(6, seed=1), rig.doc(5, seed=2)
    rig.cache_on_host(first)
    assert rig.used(Tier.HOST)["full"] == 6
    rig.cache_on_host(second)  # its state displaces the first one's
    assert rig.matched(first) == (0, 0)
    assert rig.matched(second) == (0, 5)
    assert rig.used(Tier.HOST)["full"] == 5


@pytest.mark.parametrize("mix", RECURRENT)
def test_request_that_saved_no_state_leaves_nothing_c23(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(6, seed=1)
    lease = rig.acquire(key)
    assert rig.grow(lease, key, save=False)
    rig.run()
    finish(rig, lease)
    assert_empty(rig)


def test_windows_are_released_while_a_request_grows_c23() -> None:
    rig = Rig(mix="full+window", store=False)
    key = rig.doc(40, seed=1)
    lease = rig.compute(key[:4])
    for end in range(5, 41):
        assert rig.grow(lease, key[:end])
        assert rig.used(Tier.DEVICE) == {"full": end, "window": rig.kept_window}
        rig.run()
        assert rig.used(Tier.HOST) == {"full": end, "window": 0}  # it has not come to rest
    finish(rig, lease)
    for tier in Tier:
        assert rig.used(tier) == {"full": 40, "window": rig.kept_window}


def test_long_prompt_needs_no_more_than_a_window_and_a_chunk_c23() -> None:
    rig = Rig(mix="full+window", store=False, pools={"window": PoolSize(8, 8)})
    key = rig.doc(60, seed=1)
    lease = rig.acquire(key)
    for end in range(4, 61, 4):
        assert rig.grow(lease, key[:end])
    finish(rig, lease)
    assert rig.matched(key) == (60, 0)


@pytest.mark.parametrize("mix", WINDOWED)
def test_session_of_many_turns_holds_a_window_for_every_point_c23(mix: str) -> None:
    """Without snapshots one, at its end."""
    rig = Rig(mix=mix, device=256, host=256, store=False, snapshots=SnapshotConfig(per_path=3))
    key = rig.doc(40, seed=1)
    for turn in range(5, 41, 5):
        rig.cache(key[:turn])
        points = min(turn // 5, 3) if "recurrent" in mix else 1
        for tier in Tier:
            assert rig.used(tier)["window"] == points * rig.kept_window
            assert rig.used(tier)["full"] == turn
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 40)


@pytest.mark.parametrize("mix", WINDOWED)
def test_session_that_comes_back_from_the_host_releases_there_too_c23(mix: str) -> None:
    rig = Rig(mix=mix, store=False, snapshots=SnapshotConfig(per_path=1))
    key = rig.doc(40, seed=1)
    for turn in range(5, 41, 5):
        rig.cache_on_host(key[:turn])
        assert rig.used(Tier.HOST)["window"] == rig.kept_window
        assert rig.used(Tier.DEVICE)["window"] == 0
    assert rig.matched(key) == (0, 40)


@pytest.mark.parametrize("mix", WINDOWED)
def test_session_that_grows_by_fetching_releases_what_it_leaves_behind_c23(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(12, seed=1)
    rig.cache_on_host(key[:3])
    before = rig.used(Tier.HOST)["window"]
    rig.cache_in_store(key)
    lease, _ = fetching(rig, key)
    rig.run()
    assert rig.manager.admit(lease) == 12
    finish(rig, lease)
    kept = before if "recurrent" in mix else 0  # the snapshot keeps it a point
    assert rig.used(Tier.HOST)["window"] == WINDOW_PAGES + kept


@pytest.mark.parametrize("mix", WINDOWED)
def test_forks_keep_their_window_c23(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    key = rig.doc(9, seed=1)
    rig.cache_with_point(key, 4)
    third = branch_of(rig, key, 4)
    assert rig.matched(third) == (4, 0)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(third) == (0, 4)


@pytest.mark.parametrize("mix", WINDOWED)
def test_window_somebody_stands_on_is_kept_on_the_host_too_c23(mix: str) -> None:
    """Two requests go on from one point: what the first releases, the fork still needs."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(9, seed=1)
    rig.cache(key[:4])
    keys = [branch_of(rig, key, 4, pages=5, seed=seed) for seed in (2, 3)]
    leases = [rig.acquire(each) for each in keys]
    for lease, each in zip(leases, keys, strict=True):
        assert lease.num_device == 4
        assert rig.grow(lease, each)
    for lease in leases:
        finish(rig, lease)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(branch_of(rig, key, 4, seed=4)) == (0, 4)


@pytest.mark.parametrize("mix", RECURRENT)
def test_end_of_a_prompt_can_be_gone_on_from_on_the_host_too_c20(mix: str) -> None:
    """The same question asked again, after the device has forgotten it."""
    rig = Rig(mix=mix, store=False)
    key = rig.doc(10, seed=1)
    lease = rig.compute(key[:4])
    assert rig.grow(lease, key)
    finish(rig, lease)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key[:4]) == (0, 4)
    assert rig.matched(key) == (0, 10)


@pytest.mark.parametrize("mix", MIXES)
def test_who_yields_keeps_nothing_of_a_prompt_that_goes_another_way(mix: str) -> None:
    """Two prompts share their first page, and one can only be gone on from at its end."""
    rig = Rig(mix=mix, store=False)
    first = rig.doc(3, seed=1)
    rig.cache_on_host(first)
    lease = rig.acquire(branch_of(rig, first, 1, pages=4))
    rig.manager.yield_device(lease)
    assert lease.num_host <= 1
    rig.manager.admit(lease)
    assert lease.num_device + lease.num_host <= 1
    finish(rig, lease)


@pytest.mark.parametrize("mix", RECURRENT)
def test_a_load_for_which_a_state_lacks_room_evicts_no_pages_c34(mix: str) -> None:
    rig = Rig(mix=mix, device=8, pools={"recurrent": PoolSize(2, 8)}, store=False)
    wanted, other = rig.doc(4, seed=1), rig.doc(6, seed=2)
    rig.cache_on_host(wanted)
    rig.cache(other)
    users = [rig.acquire(rig.doc(1, seed=seed)) for seed in (3, 4)]
    assert all(rig.manager.begin(user) for user in users)  # they have all slots
    lease = rig.acquire(wanted)
    before = rig.used(Tier.DEVICE)
    assert before["full"] == 6
    assert rig.manager.load(lease) == 0
    assert rig.used(Tier.DEVICE) == before
    for each in (*users, lease):
        finish(rig, each)


def test_a_load_for_which_no_window_has_room_splits_nothing_c34() -> None:
    """All of it does not fit, for want of full pages; nor does less, for want of a window."""
    rig = Rig(mix="full+window", device=6, pools={"window": PoolSize(3, 8)}, store=False)
    wanted = rig.doc(3, seed=1)
    rig.cache_on_host(wanted)
    other = rig.compute(rig.doc(3, seed=2))
    assert rig.manager.extend(other, 1)
    lease = rig.acquire(wanted)
    before = rig.manager._core.tree.changes
    assert rig.manager.load(lease) == 0
    assert rig.manager._core.tree.changes == before
    finish(rig, other)
    assert rig.manager.load(lease) == 3
    finish(rig, lease)
