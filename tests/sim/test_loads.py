"""Loads of several requests over the same path, under pressure and out of order."""

from __future__ import annotations

from quire.manager import LoadState
from quire.messages import Load, Transferred
from quire.types import PageStatus, Tier, num_pages, page_array
from sim.harness import Rig

LONG = list(range(12))  # six pages
SHORT = LONG[:6]  # their first three
OTHER = list(range(100, 112))


def rig_with_long_on_host(device_pages: int = 16) -> Rig:
    rig = Rig(device_pages=device_pages)
    rig.serve(LONG)
    rig.flush(Tier.DEVICE)
    return rig


def test_loading_does_not_evict_the_pages_it_has_just_found_on_the_device_c7() -> None:
    """Somebody else loaded the first half meanwhile, and nobody holds it any more."""
    rig = rig_with_long_on_host(device_pages=7)
    lease = rig.acquire(LONG)
    rig.manager.release(rig.begin(SHORT))
    busy = rig.acquire(OTHER)
    assert rig.manager.extend(busy, 2)  # two pages are left: too few for the second half
    rig.manager.load(lease)
    rig.manager.check_invariants()
    rig.settle()
    assert lease.num_device == 5
    rig.check(lease)
    rig.manager.release(lease)
    rig.manager.release(busy)
    rig.finish()


def test_a_load_that_overtakes_the_one_before_it_is_kept_c11() -> None:
    """Two loads on one path; the lower half arrives first, then the upper half."""
    rig = rig_with_long_on_host()
    first, second = rig.acquire(SHORT), rig.acquire(LONG)
    rig.manager.load(first)
    rig.manager.load(second)
    upper, lower = (command for command in rig.manager.step() if isinstance(command, Load))
    for load in (lower, upper):
        move(rig, load)
        rig.manager.step([report(load)])
        rig.manager.check_invariants()
    assert second.load_state is LoadState.IDLE
    rig.check(second)
    rig.manager.release(first)
    rig.manager.release(second)
    rig.finish()


def test_a_load_that_overtook_one_that_fails_shares_its_fate_c11() -> None:
    rig = rig_with_long_on_host()
    first, second = rig.acquire(SHORT), rig.acquire(LONG)
    rig.manager.load(first)
    rig.manager.load(second)
    upper, lower = (command for command in rig.manager.step() if isinstance(command, Load))
    move(rig, lower)
    rig.manager.step([report(lower)])
    rig.manager.check_invariants()
    assert rig.manager.match(rig.key(LONG)).num_device == 0
    rig.manager.step([report(upper, PageStatus.FAILED)])
    rig.manager.check_invariants()
    assert second.load_state is LoadState.FAILED
    rig.manager.release(first)
    rig.manager.release(second)
    assert rig.manager.match(rig.key(LONG)).num_host == 6
    rig.finish()


def move(rig: Rig, load: Load) -> None:
    """Do by hand what a worker does for a load."""
    contents = rig.pools.read(0, Tier.HOST, page_array(load.host).tolist())
    for page, content in zip(page_array(load.device).tolist(), contents, strict=True):
        rig.pools.write(0, Tier.DEVICE, page, content)


def report(load: Load, status: PageStatus = PageStatus.OK) -> Transferred:
    return Transferred(
        load.op, 0, load.component, 0, bytes([status]) * num_pages(load.device), final=True
    )


def test_a_later_request_does_not_keep_the_pages_of_a_failed_load_alive_c11() -> None:
    """It never counted on them: once the one that did has gone, the host copy can be loaded."""
    rig = rig_with_long_on_host()
    first = rig.acquire(LONG)
    rig.manager.load(first)
    (load,) = rig.manager.step()
    assert isinstance(load, Load)
    rig.manager.step([report(load, PageStatus.FAILED)])
    second = rig.acquire(LONG)
    rig.manager.release(first)
    assert rig.manager.load(second) == 6
    rig.settle()
    rig.check(second)
    rig.manager.release(second)
    rig.finish()
