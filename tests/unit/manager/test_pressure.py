"""What I cached is still found after a burst: memory that is short in one tier costs nothing in the
other, and a call that says no has changed nothing (C34, C35)."""

from __future__ import annotations

import pytest

from quire.components import PoolSize
from quire.config import WriteConfig, WritePolicy
from quire.messages import Backup
from quire.types import Tier
from support import FAILED, MIXES, PAGE, Rig, tokens_for


def host_pages(rig: Rig) -> int:
    return rig.used(Tier.HOST)["full"]


def conversations(rig: Rig, count: int, *, turns: int = 3, pages: int = 3) -> list[list[int]]:
    """Conversations that go on turn by turn, taking turns, below one system prompt."""
    system = tokens_for(4, seed=1)
    talks = [system + tokens_for(turns * pages, seed=100 + n) for n in range(count)]
    for turn in range(1, turns + 1):
        for talk in talks:
            rig.cache(rig.key(talk[: (4 + turn * pages) * PAGE]))
    return talks


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("store", [False, True])
def test_a_burst_on_the_device_costs_no_host_page_c35(policy: WritePolicy, store: bool) -> None:
    """90 % of the device are in use; then one request needs nearly all that is left."""
    rig = Rig(device=100, host=120, store=store, write=WriteConfig(policy=policy))
    blocker = rig.acquire(rig.doc(1, seed=9))
    assert rig.manager.extend(blocker, 40)
    conversations(rig, 40)
    assert rig.manager.extend(blocker, 48)
    rig.run()
    before = host_pages(rig)
    assert before > 40
    burst = rig.acquire(rig.doc(2, seed=10))
    rig.manager.extend(burst, 9)
    rig.run()
    assert host_pages(rig) >= before
    rig.manager.release(burst)
    rig.manager.release(blocker)


@pytest.mark.parametrize(
    ("mix", "policy"),
    [("full", policy) for policy in WritePolicy]
    + [(mix, WritePolicy.WRITE_THROUGH) for mix in MIXES],
)
def test_shared_prompt_survives_when_the_device_is_emptied_c35(
    mix: str, policy: WritePolicy
) -> None:
    """Whatever the host has stays usable when the device lets go of all it may. (With windows or
    states, full pages that were copied ahead of theirs are of use only with the device's.)"""
    rig = Rig(mix=mix, device=24, host=200, store=False, write=WriteConfig(policy=policy))
    talks = conversations(rig, 6, turns=2)
    rig.run()
    before = host_pages(rig)
    rig.manager.flush(Tier.DEVICE)
    rig.run()  # what the host cannot do without is copied, and can go then
    assert host_pages(rig) >= before
    rig.manager.flush(Tier.DEVICE)
    assert rig.used(Tier.DEVICE)["full"] == 0
    found = sum(sum(rig.matched(rig.key(talk))) > 0 for talk in talks)
    assert found == 6 if before else found == 0


def test_backup_that_failed_is_made_up_for_before_the_page_may_go_c35(mix: str) -> None:
    rig = Rig(mix=mix, device=8, host=64, store=False)
    base = tokens_for(4, seed=1)
    rig.manager.release(rig.compute(rig.key(base[: 2 * PAGE])))
    rig.step()
    rig.answer_all(Backup, statuses=[FAILED, FAILED])  # the upper half stays on the device
    rig.cache(rig.key(base))
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(rig.key(base)) == (0, 4)


def test_pages_from_elsewhere_below_a_device_only_prefix_do_not_hang_on_the_device_c35() -> None:
    """The store brings the end of a prompt whose beginning only the device has."""
    rig = Rig(device=32, host=32)
    key = rig.doc(8, seed=1)
    rig.cache_in_store(key)
    rig.cache(key[:4])
    rig.manager.flush(Tier.HOST, "full")
    assert rig.matched(key) == (4, 0)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.run()
    assert rig.manager.admit(lease) == 8
    rig.manager.release(lease)
    rig.run()
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (0, 8)


def test_host_without_room_for_what_is_owed_never_blocks_the_device_c35() -> None:
    """All of the host is in use, so what the device owes cannot be copied: it may go all the same,
    for want of host memory."""
    rig = Rig(device=12, host=4)
    key = rig.doc(8, seed=1)
    rig.cache_in_store(key)
    rig.cache(key[:4])
    rig.manager.flush(Tier.HOST, "full")
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.run()
    rig.manager.admit(lease)
    rig.run()
    rig.manager.release(lease)
    rig.run()
    other = rig.acquire(rig.doc(12, seed=2))
    assert rig.manager.extend(other, 12)
    rig.manager.release(other)


@pytest.mark.parametrize("tier", list(Tier))
def test_extend_that_fails_has_evicted_nothing_c34(mix: str, tier: Tier) -> None:
    rig = Rig(mix=mix, device=64, host=64, store=False)
    doc = rig.doc(40, seed=1)
    rig.cache(doc)
    if tier is Tier.HOST:
        rig.manager.flush(Tier.HOST, "full")
    blocker = rig.acquire(rig.doc(1, seed=2))
    assert rig.manager.extend(blocker, 20)
    before = (rig.matched(doc), rig.used(Tier.DEVICE), rig.used(Tier.HOST))
    lease = rig.acquire(rig.doc(1, seed=3))
    assert not rig.manager.extend(lease, 50)
    assert (rig.matched(doc), rig.used(Tier.DEVICE), rig.used(Tier.HOST)) == before
    assert rig.manager.counters.evicted_device_pages == 0
    assert rig.manager.extend(lease, 44)
    rig.manager.release(lease)
    rig.manager.release(blocker)


def test_window_or_state_that_cannot_be_had_evicts_nothing_c34(mix: str) -> None:
    pools = {"window": PoolSize(6, 6), "recurrent": PoolSize(3, 3)}
    rig = Rig(mix=mix, pools=pools, store=False)
    doc = rig.doc(6, seed=1)
    rig.cache(doc)
    lease = rig.acquire(rig.doc(9, seed=2))
    before = (rig.matched(doc), rig.used(Tier.DEVICE))
    if "window" in mix:
        assert not rig.manager.cover(lease, 9)
    assert (rig.matched(doc), rig.used(Tier.DEVICE)) == before
    rig.manager.release(lease)


def test_only_so_many_pages_go_as_are_needed_c7() -> None:
    """A long document loses its end, not all of itself, to a short one."""
    rig = Rig(device=200, host=0, store=False)
    long = rig.doc(150, seed=1)
    rig.cache(long)
    rig.cache(rig.doc(51, seed=2))
    assert rig.matched(long)[0] >= 150 * 3 // 4 - 1  # a quarter of it at a time


def test_spare_copy_is_one_without_which_nothing_is_lost_c35() -> None:
    """A full host gives up copies of what the device has too; of a shared prompt only if nothing
    that only the host has hangs below it."""
    base = tokens_for(4, seed=1)
    ends = [base + tokens_for(4, seed=s) for s in (2, 3, 4)]
    rig = Rig(device=64, host=16)
    for end in ends:
        rig.cache(rig.key(end))
    rig.manager.flush(Tier.DEVICE)
    prompt = rig.acquire(rig.key(base))
    rig.manager.load(prompt)
    rig.run()
    rig.manager.release(prompt)  # the prompt is on both, its ends only on the host
    found = [rig.matched(rig.key(end)) for end in ends]
    assert found == [(4, 4)] * 3
    rig.cache(rig.doc(3, seed=9))
    rig.manager.flush(Tier.DEVICE)
    assert sum(rig.matched(rig.key(end)) == (0, 8) for end in ends) == 2
