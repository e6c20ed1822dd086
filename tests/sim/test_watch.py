"""What must hold of every call of the manager under pressure: C34, C35, C37, C38, in simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease
from quire.messages import AttachStore, Fetch, StoreChanged
from quire.sim import SimOptions, SimulationError, simulate
from quire.sim.audit import audit
from quire.sim.clock import VirtualClock
from quire.sim.content import Oracle, Pools
from quire.sim.pd.options import SimPdOptions
from quire.sim.pd.run import simulate_pd
from quire.sim.watch import Rule, WatchedManager
from quire.types import OperationId, PageIds, RequestId, Tier
from support import namespace, tokens_for

OPTIONS = SimOptions()
FAILED_ONCE = {
    Rule.NO_CHANGES_NOTHING: ((2,), (1,)),
    Rule.HOST_KEEPS: ((4,), (4,)),
    Rule.FETCHED_ONCE: ((5,), ()),
    Rule.PREFETCH_KEEPS: ((), (3,)),
}
"""Seeds of `sim run` and `sim pd` that broke a rule once."""


@pytest.fixture(params=Rule, ids=lambda rule: rule.value)
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rule:
    """That rule alone is watched."""
    monkeypatch.setattr("quire.sim.watch.RULES", frozenset({request.param}))
    chosen: Rule = request.param
    return chosen


def test_under_pressure_every_call_keeps_the_rule(rule: Rule) -> None:
    runs, clusters = FAILED_ONCE[rule]
    for seed in runs:
        simulate(seed, 600, replace(SimOptions.from_seed(seed), strict=True))
    for seed in clusters:
        simulate_pd(seed, 300, replace(SimPdOptions.from_seed(seed), strict=True))


# ---- a watch that sees nothing proves nothing ----------------------------------------------------


def watched() -> WatchedManager:
    components = OPTIONS.components()
    return WatchedManager(OPTIONS.cache_config(), clock=VirtualClock(), components=components)


def acquired(manager: CacheManager) -> Lease:
    key = PrefixKey(namespace(), tokens_for(4, seed=1))
    return manager.acquire(manager.match(key), RequestId("r"))


def cached(manager: CacheManager) -> Lease:
    """A lease whose four pages are committed."""
    lease = acquired(manager)
    assert manager.extend(lease, 4)
    manager.commit(lease, lease.key)
    return lease


def test_a_refusal_that_evicts_is_seen_c34(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = watched()
    lease = cached(manager)
    manager.release(lease)
    other = acquired(manager)

    def refuse(self: CacheManager, lease: Lease, count: int) -> bool:
        self.release(other)
        CacheManager.flush(self, Tier.DEVICE)
        return False

    monkeypatch.setattr(CacheManager, "extend", refuse)
    with pytest.raises(SimulationError, match="C34: extend said no"):
        manager.extend(lease, 1)


def test_a_refusal_that_changes_nothing_is_none_of_its_business_c34() -> None:
    manager = watched()
    lease = acquired(manager)
    assert not manager.extend(lease, OPTIONS.device_pages + 1)
    assert manager.load(lease) == 0


def test_a_host_page_that_goes_though_the_host_has_room_is_seen_c35(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = watched()
    pages = {1, 2}
    monkeypatch.setattr("quire.sim.watch.ready_host_pages", lambda _manager: frozenset(pages))
    manager.flush(Tier.DEVICE)
    pages.remove(1)
    with pytest.raises(SimulationError, match="C35: acquire lost 1 host pages"):
        acquired(manager)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_page_that_is_fetched_a_second_time_is_seen_c37(
    monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    """Unless nobody waits for the first any more."""
    manager, key = watched(), PrefixKey(namespace(), tokens_for(4, seed=1))
    monkeypatch.setattr("quire.sim.watch.is_awaited", lambda _manager, op: op != 1 or is_awaited)
    fetches = [
        Fetch(OperationId(op), "full", key.page_keys(first, first + 2), PageIds(bytes(8)), 1.0)
        for op, first in ((1, 0), (2, 1))
    ]
    monkeypatch.setattr(CacheManager, "step", lambda _manager, _reports: [fetches.pop(0)])
    manager.step()
    if is_awaited:
        with pytest.raises(SimulationError, match="C37: 1 pages of 2 are on their way by 1"):
            manager.step()
    else:
        manager.step()


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_prefetch_that_its_request_still_waits_for_is_missed_c38(is_waiting: bool) -> None:
    manager = watched()
    manager.store.attach("sim://one")
    (attach,) = manager.step()
    assert isinstance(attach, AttachStore)
    manager.step([StoreChanged(attach.op, 0)])
    lease = acquired(manager)
    manager.prefetch(lease)
    manager.release(lease)
    if is_waiting:
        with pytest.raises(SimulationError, match="C38: r waits"):
            manager.check_kept(lambda _owner: is_waiting)
    else:
        manager.check_kept(lambda _owner: is_waiting)
    manager.check_kept(lambda _owner: True)  # said once


# ---- names: what an audit sees beside the bytes --------------------------------------------------


def audit_all(manager: CacheManager) -> None:
    oracle = Oracle()
    oracle.register(namespace())
    audit(manager, oracle, Pools(1, OPTIONS.pool_sizes()), ranks=[])


def test_keys_of_other_pages_are_seen_c4() -> None:
    manager = watched()
    lease = cached(manager)
    audit_all(manager)
    lease.tail.page_keys = PrefixKey(namespace(), tokens_for(4, seed=2)).page_keys()
    with pytest.raises(SimulationError, match="goes by the keys of other pages"):
        audit_all(manager)


def test_a_lease_on_another_prompt_is_seen() -> None:
    manager = watched()
    lease = cached(manager)
    lease.key = PrefixKey(namespace(), tokens_for(4, seed=2))
    with pytest.raises(SimulationError, match=r"r stands on .* of another prompt"):
        audit_all(manager)
