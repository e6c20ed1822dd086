"""Write policies, host pressure, and getting pages into the store (C10, C16)."""

from __future__ import annotations

import pytest

import quire.keys
import quire.tree.tree
from quire.components import PoolSize
from quire.config import WriteConfig, WritePolicy
from quire.keys import UnitKind, chain_keys
from quire.messages import Backup, Write
from quire.types import PageStatus, Tier, num_pages, split_keys
from support import FAILED, MIX_PARTS, OK, PAGE, Rig, tokens_for

AMPLE = {"window": PoolSize(64, 64), "recurrent": PoolSize(64, 64)}
"""Pools for tests whose pressure is on the pages of full attention."""


def test_write_through_copies_at_once_c10(mix: str) -> None:
    rig = Rig(mix=mix, store=False)
    lease = rig.compute(rig.doc(3, seed=1))
    rig.step()
    assert rig.has(Backup)  # while the request still runs
    rig.run()
    rig.manager.release(lease)
    rig.run()  # a window is copied where the request has come to rest
    assert rig.manager.counters.backed_up_pages == rig.weight(3)


def test_selective_write_through_copies_what_is_reused_c10(mix: str) -> None:
    policy = WriteConfig(policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=2)
    rig = Rig(mix=mix, store=False, write=policy)
    reused, once = rig.doc(3, seed=1), rig.doc(3, seed=2)
    rig.cache(reused)
    rig.cache(once)
    rig.manager.release(rig.acquire(reused))
    rig.run()
    assert rig.manager.counters.backed_up_pages == 0
    rig.manager.release(rig.acquire(reused))
    rig.run()
    assert rig.manager.counters.backed_up_pages == rig.weight(3)
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(reused) == (0, 3)
    assert rig.matched(once) == (0, 0)


def test_write_back_copies_the_coldest_only_when_the_device_runs_short_c10(mix: str) -> None:
    policy = WriteConfig(policy=WritePolicy.WRITE_BACK, low_watermark=0.25, high_watermark=0.5)
    rig = Rig(mix=mix, device=16, store=False, write=policy)
    docs = [rig.doc(4, seed=s) for s in range(4)]
    for doc in docs[:3]:
        rig.cache(doc)
    assert rig.manager.counters.backed_up_pages == 0
    rig.cache(docs[3])  # no page is free now: half of the device is to be cheaply freeable
    assert rig.manager.counters.backed_up_pages == 8
    rig.cache(rig.doc(4, seed=9))
    assert rig.matched(docs[0]) == (0, 4)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_what_a_long_request_displaces_is_still_found_on_the_host_c10(policy: WritePolicy) -> None:
    """Requests were short; the one that has come, and waits for its turn, is not."""
    rig = Rig(device=32, host=24, store=False, write=WriteConfig(policy=policy))
    rig.cache_on_host(rig.doc(24, seed=1))  # what nobody will miss
    short = [rig.doc(4, seed=s) for s in range(2, 10)]
    for doc in short:
        rig.cache(doc)
    long = rig.acquire(rig.doc(24, seed=99))
    rig.run()
    assert rig.manager.extend(long, 24)
    assert sum(sum(rig.matched(doc)) for doc in short) == 32
    rig.manager.release(long)


def test_write_back_never_blocks_the_step_c10(mix: str) -> None:
    """An allocation does not wait for a backup: it takes what may go, or says no."""
    policy = WriteConfig(policy=WritePolicy.WRITE_BACK, low_watermark=0.5, high_watermark=1.0)
    rig = Rig(mix=mix, pools=AMPLE, device=8, store=False, write=policy)
    rig.manager.release(rig.compute(rig.doc(4, seed=1)))
    rig.manager.release(rig.compute(rig.doc(4, seed=2)))
    rig.step()
    backup = rig.take(Backup)  # reads all eight pages
    lease = rig.acquire(rig.doc(4, seed=3))
    assert not rig.manager.extend(lease, 4)
    rig.answer(backup)
    rig.run()  # other state that the host now needs follows
    assert rig.manager.extend(lease, 4)
    rig.manager.release(lease)


def released_windows(rig: Rig, requests: int, pages: int) -> int:
    """Window pages that requests have let go of while they grew."""
    return requests * max(0, pages - rig.kept_window) if "window" in rig.parts else 0


def test_full_host_gives_up_redundant_copies_first_c10(mix: str) -> None:
    rig = Rig(mix=mix, pools=AMPLE, device=64, host=8)
    cold, hot = rig.doc(4, seed=1), rig.doc(4, seed=2)
    rig.cache_on_host(cold)
    rig.cache(hot)
    assert rig.matched(cold) == (0, 4)
    rig.cache(rig.doc(4, seed=3))  # needs room on the host
    assert rig.matched(cold) == (0, 4)
    assert rig.matched(hot) == (4, 0)
    assert rig.manager.counters.evicted_spare_pages == 4
    assert rig.manager.counters.dropped_pages == released_windows(rig, 3, 4)


def test_full_host_without_redundant_copies_gives_up_its_leaves_c10(mix: str) -> None:
    rig = Rig(mix=mix, pools=AMPLE, device=64, host=8)
    first, second = rig.doc(4, seed=1), rig.doc(4, seed=2)
    rig.cache_on_host(first)
    rig.cache_on_host(second)
    rig.cache(rig.doc(4, seed=3))
    assert rig.matched(first) == (0, 0)
    assert rig.matched(second) == (0, 4)
    assert rig.used(Tier.HOST)["full"] == 8
    # Without the part that holds its window the rest is dead weight, and goes uncounted.
    assert rig.manager.counters.evicted_host_pages == (rig.kept_window or 4)
    assert rig.manager.counters.dropped_pages == rig.weight(4) + released_windows(rig, 3, 4)


def test_an_end_nobody_comes_back_to_keeps_no_prompt_twice_c10() -> None:
    """A talk went on another way than its last page: what others cached is worth more than that
    page and, for its sake, a second copy of all before it."""
    rig = Rig(device=64, host=16, store=False)
    others, talk = rig.doc(5, seed=1), tokens_for(10, seed=2)
    rig.cache_on_host(others)
    rig.cache_on_host(rig.key(talk + tokens_for(1, seed=3)))
    rig.cache(rig.key(talk))  # on the device again
    rig.manager._core.evict(Tier.HOST, 5)
    assert rig.matched(others) == (0, 5)
    assert sum(rig.matched(rig.key(talk))) == 10


def test_a_shared_prompt_keeps_its_copy_once_that_has_cost_as_much_c10() -> None:
    """Ever new talks below one prompt come to the host: only the first go for its copy's sake."""
    rig = Rig(device=64, host=64, store=False)
    rig.cache_on_host(rig.doc(30, seed=1))  # what nobody will miss
    prompt = tokens_for(8, seed=2)
    talks = [rig.key(prompt + tokens_for(3, seed=s)) for s in range(3, 9)]
    for talk in talks:
        rig.cache(talk)
        rig.manager._core.evict(Tier.DEVICE, 3)  # its own pages; the prompt stays
        rig.manager._core.evict(Tier.HOST, 4)
    assert [rig.matched(talk) for talk in talks[2:]] == [(8, 3)] * 4


def test_hot_page_displaces_no_copy_until_it_grows_cold_c10(mix: str) -> None:
    policy = WriteConfig(low_watermark=0.25, high_watermark=0.5)
    rig = Rig(mix=mix, pools=AMPLE, device=16, host=4, store=False, write=policy)
    first, second = rig.doc(4, seed=1), rig.doc(4, seed=2)
    rig.cache(first)
    rig.cache(second)
    assert rig.manager.counters.backup_deferred_pages == 4
    assert rig.manager.counters.evicted_spare_pages == 0
    rig.manager.release(rig.acquire(first))  # the second is the colder now
    for seed in range(3, 5):
        rig.cache(rig.doc(4, seed=seed))
    assert rig.manager.counters.evicted_spare_pages == 4
    rig.manager._core.evict(Tier.DEVICE, 4)
    assert rig.matched(second) == (0, 4)


def test_no_room_on_the_host_is_counted_and_nothing_breaks_c10(mix: str) -> None:
    rig = Rig(mix=mix, pools=AMPLE, window_pages=4, device=64, host=2, threshold_pages=1)
    key = rig.doc(4, seed=1)
    rig.cache(key)
    assert rig.manager.counters.backup_skipped_pages == 4
    assert rig.matched(key) == (4, 0)


def test_whatever_reaches_the_host_goes_to_the_store(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(4, seed=1)
    rig.cache(key)
    assert rig.in_store(key)
    assert sum(map(len, rig.stored.values())) == rig.manager.counters.written_pages == rig.weight(4)


@pytest.mark.parametrize(("mix", "part"), MIX_PARTS)
def test_failed_write_is_retried_c16(mix: str, part: str) -> None:
    rig = Rig(mix=mix, window_pages=4)
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer_all(Backup)
    bad = [FAILED] if part == "recurrent" else [OK, FAILED, OK, OK]
    rig.answer_all(Write, part, statuses=bad)
    assert not rig.has(Write)
    assert not rig.in_store(key)
    assert rig.manager.counters.write_retried_pages == len(bad)
    rig.now += 10.0
    rig.run()
    assert rig.in_store(key)


def test_hole_left_after_all_tries_is_repaired_by_the_next_use_c16(mix: str) -> None:
    rig = Rig(mix=mix, write=WriteConfig(max_attempts=1))
    base = tokens_for(4, seed=1)
    rig.manager.release(rig.compute(rig.key(base[: 2 * PAGE])))
    rig.step()
    rig.answer_all(Backup)
    rig.answer_all(Write, statuses=[OK, FAILED])
    rig.cache(rig.key(base))  # pages behind the hole; using the prefix repairs it
    assert rig.in_store(rig.key(base))


def test_node_split_while_it_waits_for_its_retry_is_written_whole_c16(mix: str) -> None:
    rig = Rig(mix=mix)
    base = tokens_for(4, seed=1)
    key, other = rig.key(base), rig.key(base[: 2 * PAGE] + tokens_for(1, seed=2))
    branch = rig.acquire(other)  # before the rest: acquiring repairs holes, this is about the retry
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer_all(Backup)
    rig.answer_all(Write, statuses=FAILED)
    assert rig.grow(branch, other)  # splits after page 2
    rig.run()
    assert not rig.in_store(key)
    rig.now += 10.0
    rig.run()
    assert rig.in_store(key)
    rig.manager.release(branch)


@pytest.mark.parametrize("status", [PageStatus.REJECTED, PageStatus.TIMEOUT, PageStatus.FAILED])
def test_store_that_takes_nothing_costs_only_counters_c17(mix: str, status: PageStatus) -> None:
    rig = Rig(mix=mix, write=WriteConfig(max_attempts=2))
    key = rig.doc(4, seed=1)
    rig.manager.release(rig.compute(key))
    for _ in range(4):
        rig.step()
        for command in list(rig.pending):
            rig.pending.remove(command)
            bad = isinstance(command, Write) and [status] * num_pages(command.host)
            rig.answer(command, statuses=bad or None)
        rig.now += 10.0
    assert rig.manager.counters.write_failed_pages == rig.weight(4)
    assert rig.manager.counters.faults[f"write:{status.name.lower()}"] >= rig.weight(4)
    assert rig.matched(key) == (4, 0)
    assert rig.manager.idle


def test_store_that_lost_a_page_in_the_middle_yields_the_prefix_before_it_c16(mix: str) -> None:
    rig = Rig(mix=mix, threshold_pages=1)
    key = rig.doc(5, seed=1)
    rig.cache_in_store(key, points=range(1, 6))
    rig.stored["full"].remove(split_keys(key.page_keys())[3])
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.run()
    assert rig.manager.admit(lease) == 3
    rig.manager.release(lease)


def test_slow_store_cannot_pin_the_whole_host_c10(mix: str) -> None:
    rig = Rig(mix=mix, device=64, host=16)
    for seed in range(4):
        rig.manager.release(rig.compute(rig.doc(4, seed=seed)))
        rig.step()
        rig.answer_all(Backup)
    for part in rig.parts:
        writes = [c for c in rig.pending if isinstance(c, Write) and c.component == part]
        assert sum(num_pages(w.host) for w in writes) <= 8  # of 16, however many wait
    rig.run()
    assert rig.manager.counters.written_pages == 4 * rig.weight(4)


def test_pages_are_written_after_those_that_they_need_have_been_c36() -> None:
    """The store takes no page before its parent; what comes later to the host waits its turn."""
    rig = Rig()
    base = tokens_for(6, seed=1)
    whole = rig.key(base)
    lease = rig.compute(whole[:2])
    rig.step()
    rig.answer_all(Backup)
    first = rig.take(Write)
    for end in (4, 6):
        assert rig.grow(lease, whole[:end])
        rig.step()
        rig.answer_all(Backup)
    assert not rig.has(Write)
    rig.answer(first)
    assert rig.has(Write)
    rig.run()
    assert rig.in_store(whole)
    rig.manager.release(lease)
    rig.run()
    assert rig.manager.idle


def test_pages_behind_a_write_that_failed_follow_it_into_the_store_c16() -> None:
    rig = Rig()
    base = tokens_for(4, seed=1)
    whole = rig.key(base)
    lease = rig.compute(whole[:2])
    rig.step()
    rig.answer_all(Backup)
    first = rig.take(Write)
    assert rig.grow(lease, whole)
    rig.step()
    rig.answer_all(Backup)
    rig.answer(first, statuses=FAILED)
    rig.manager.release(lease)
    rig.run()
    rig.now += 10.0
    rig.run()
    assert rig.in_store(whole)


@pytest.mark.parametrize("unit", UnitKind)
def test_keys_of_new_pages_are_computed_where_they_are_written_c4(
    unit: UnitKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step hashes nothing for a prompt that nobody asks for again: not its pages, of which a
    new document has thousands, nor those of its next turns."""
    rig = Rig(unit=unit)
    key, whole = (rig.key(tokens_for(n, seed=1, unit=unit)) for n in (3, 8))
    hashed: list[int] = []

    def spied(seed: bytes, tokens: bytes, step: int, width: int) -> bytes:
        hashed.append(len(tokens))
        return chain_keys(seed, tokens, step, width)

    monkeypatch.setattr(quire.tree.tree, "chain_keys", spied)
    monkeypatch.setattr(quire.keys, "chain_keys", spied)
    lease = rig.compute(key)
    rig.run()
    for end in (5, 8):
        assert rig.grow(lease, whole[:end])
        rig.run()
    rig.manager.release(lease)
    rig.run()
    assert hashed == []
    monkeypatch.undo()
    assert rig.in_store(whole)
    node = rig.manager.match(whole).walk.nodes[-1]
    assert node.page_keys == whole.page_keys(node.start, node.end)


def test_a_slow_store_holds_no_device_pages() -> None:
    """What is being written is read from the host: the device may have its pages back."""
    rig = Rig(device=8, host=64)
    doc = rig.doc(6, seed=1)
    lease = rig.compute(doc)
    rig.manager.release(lease)
    rig.step()
    rig.answer_all(Backup)
    written = rig.take(Write)  # and it does not end
    assert rig.manager.room() == 8
    other = rig.compute(rig.doc(8, seed=2))
    assert rig.matched(doc) == (0, 6)
    rig.manager.check_invariants()
    rig.answer(written)
    rig.manager.release(other)
    rig.run()
    assert rig.in_store(doc)
    rig.manager.check_invariants()
