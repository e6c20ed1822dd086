"""Loads of several requests over the same path, under pressure and out of order."""

from __future__ import annotations

from quire.manager import CacheManager, LoadState
from quire.messages import Load, Transferred
from quire.sim import ComponentMix
from quire.types import OperationId, PageStatus, Tier, num_pages, page_array
from sim.harness import BOTH, FULL, RECURRENT, WINDOW, Rig, with_each_mix

LONG = list(range(12))  # six pages
SHORT = LONG[:6]  # their first three
FORK = [*SHORT, 50, 51]
"""Makes the end of SHORT a point to go on from, in every mix."""
OTHER = list(range(100, 112))


def rig_with_long_on_host(mix: ComponentMix, device_pages: int = 16) -> Rig:
    rig = Rig(mix=mix, device_pages=device_pages)
    rig.serve(LONG)
    rig.serve(FORK)
    rig.flush(Tier.DEVICE)
    return rig


def loads_of(manager: CacheManager) -> list[list[Load]]:
    """The loads that the next step starts, one after another; each with all its components."""
    loads: dict[OperationId, list[Load]] = {}
    for command in manager.step():
        assert isinstance(command, Load)
        loads.setdefault(command.op, []).append(command)
    return list(loads.values())


def move(rig: Rig, load: list[Load]) -> None:
    """Do by hand what a worker does for a load."""
    for leg in load:
        name = leg.component
        contents = rig.pools.read(0, Tier.HOST, page_array(leg.host).tolist(), name)
        for page, content in zip(page_array(leg.device).tolist(), contents, strict=True):
            rig.pools.write(0, Tier.DEVICE, page, content, name)


def reports(load: list[Load], status: PageStatus = PageStatus.OK) -> list[Transferred]:
    """Of all its components; the last one has this status, the others are fine."""
    each = [PageStatus.OK] * (len(load) - 1) + [status]
    return [
        Transferred(
            leg.op, 0, leg.component, 0, bytes([outcome]) * num_pages(leg.device), final=True
        )
        for leg, outcome in zip(load, each, strict=True)
    ]


@with_each_mix
def test_loading_does_not_evict_the_pages_it_has_just_found_on_the_device_c7(
    mix: ComponentMix,
) -> None:
    """Somebody else loaded the first half meanwhile, and nobody holds it any more."""
    rig = rig_with_long_on_host(mix, device_pages=7)
    lease = rig.acquire(LONG)
    rig.manager.release(rig.begin(SHORT))
    busy = rig.acquire(OTHER)
    assert rig.manager.extend(busy, 2)  # two pages are left: too few for the second half
    rig.manager.load(lease)
    rig.manager.check_invariants()
    rig.settle()
    # Five pages fit. Their window is there, one page short of the end; a snapshot is only at three.
    assert lease.num_device == {FULL: 5, WINDOW: 5, RECURRENT: 3, BOTH: 3}[mix]
    rig.check(lease)
    rig.manager.release(lease)
    rig.manager.release(busy)
    rig.finish()


@with_each_mix
def test_a_load_that_overtakes_the_one_before_it_is_kept_c11(mix: ComponentMix) -> None:
    """Two loads on one path; the lower half arrives first, then the upper half."""
    rig = rig_with_long_on_host(mix)
    first, second = rig.acquire(SHORT), rig.acquire(LONG)
    rig.manager.load(first)
    rig.manager.load(second)
    upper, lower = loads_of(rig.manager)
    for load in (lower, upper):
        move(rig, load)
        rig.manager.step(reports(load))
        rig.manager.check_invariants()
    assert second.load_state is LoadState.IDLE
    rig.check(second)
    rig.manager.release(first)
    rig.manager.release(second)
    rig.finish()


@with_each_mix
def test_a_load_that_overtook_one_that_fails_shares_its_fate_c11(mix: ComponentMix) -> None:
    rig = rig_with_long_on_host(mix)
    first, second = rig.acquire(SHORT), rig.acquire(LONG)
    rig.manager.load(first)
    rig.manager.load(second)
    upper, lower = loads_of(rig.manager)
    move(rig, lower)
    rig.manager.step(reports(lower))
    rig.manager.check_invariants()
    assert rig.manager.match(rig.key(LONG)).num_device == 0
    rig.manager.step(reports(upper, PageStatus.FAILED))
    rig.manager.check_invariants()
    assert second.load_state is LoadState.FAILED
    rig.manager.release(first)
    rig.manager.release(second)
    assert rig.manager.match(rig.key(LONG)).num_host == 6
    rig.finish()


@with_each_mix
def test_a_later_request_does_not_keep_the_pages_of_a_failed_load_alive_c11(
    mix: ComponentMix,
) -> None:
    """It never counted on them: once the one that did has gone, the host copy can be loaded."""
    rig = rig_with_long_on_host(mix)
    first = rig.acquire(LONG)
    rig.manager.load(first)
    (load,) = loads_of(rig.manager)
    rig.manager.step(reports(load, PageStatus.FAILED))
    second = rig.acquire(LONG)
    rig.manager.release(first)
    assert rig.manager.load(second) == 6
    rig.settle()
    rig.check(second)
    rig.manager.release(second)
    rig.finish()
