"""A waiting request gives up device pages and nothing else (C38); no step looks at all leases
(C40)."""

from __future__ import annotations

import pytest

from quire.config import PrefetchPolicy
from quire.errors import LeaseError
from quire.messages import Cancel, Fetch, Probe
from quire.types import Tier
from support import MIXES, Rig

every_mix = pytest.mark.parametrize("mix", MIXES)


@every_mix
def test_device_pages_of_one_that_waits_can_go_and_its_fetch_goes_on_c38(mix: str) -> None:
    rig = Rig(mix=mix, device=12, prefetch={"policy": PrefetchPolicy.WAIT_COMPLETE})
    key = rig.doc(10, seed=1)
    rig.cache(key[:4])
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.step()
    rig.answer_all(Probe)
    assert rig.manager.room() == 8
    rig.manager.yield_device(lease)
    assert (lease.num_device, lease.num_host) == (0, 4)
    assert rig.manager.room() == 12
    other = rig.acquire(rig.doc(12, seed=2))
    assert rig.manager.extend(other, 12)
    rig.step()
    assert not rig.has(Cancel)
    rig.answer_all(Fetch)
    assert rig.manager.ready(lease)
    assert rig.manager.admit(lease) == 10
    assert (lease.num_device, lease.num_host) == (0, 10)
    rig.manager.release(other)
    rig.manager.release(lease)
    rig.run()


@every_mix
def test_what_was_not_taken_is_its_own_again_when_it_is_admitted(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache(key)
    lease = rig.acquire(key)
    pages = lease.pages
    rig.manager.yield_device(lease)
    assert rig.manager.admit(lease) == 6
    assert lease.pages == pages
    rig.manager.flush(Tier.DEVICE)
    assert rig.matched(key) == (6, 0)
    rig.manager.release(lease)


def test_what_a_request_has_computed_is_not_yielded() -> None:
    rig = Rig()
    lease = rig.acquire(rig.doc(4, seed=1))
    assert rig.manager.extend(lease, 2)
    with pytest.raises(LeaseError, match="computed"):
        rig.manager.yield_device(lease)
    rig.manager.release(lease)


class Unread(set):  # type: ignore[type-arg]
    """Leases that nobody may look through."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("somebody looks at every lease")


def test_no_step_looks_at_every_lease_c40() -> None:
    rig = Rig()
    keys = [rig.doc(4, seed=seed) for seed in range(4)]
    for key in keys[:2]:
        rig.cache_in_store(key)
    leases = [rig.acquire(key) for key in keys]
    rig.manager.leases = Unread(rig.manager.leases)
    for lease in leases:
        rig.manager.prefetch(lease)
    step = rig.manager.step
    while commands := step():
        assert rig.manager.next_wakeup() is not None
        assert len(rig.manager.pools()) == 2
        step([report for command in commands for report in rig.reports(command)])
    for lease in leases:
        rig.manager.admit(lease)
        rig.manager.load(lease)
