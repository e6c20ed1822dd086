"""What must hold of every call of the manager under pressure: C34, C35, C37, C38, C43, C44, in
simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.eviction import Retained
from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease, Wish
from quire.messages import AttachStore, Fetch, StoreChanged
from quire.sim import ComponentMix, SimOptions, SimulationError, simulate
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
    Rule.RETAINED_STAYS: ((), ()),  # below
    Rule.QUOTA_IS_OWN: ((), ()),
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


def watched(**more: float) -> WatchedManager:
    options = replace(OPTIONS, **more)
    components = options.components()
    return WatchedManager(options.cache_config(), clock=VirtualClock(), components=components)


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


# ---- retention and quotas ------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("seed", [9, 1051, 1154])
def test_what_is_retained_is_found_and_quotas_cost_nobody_else(seed: int, share: float) -> None:
    """C43 and C44. Seeds that broke one once: what was asked for before, and is over, took its
    share; a host page was given up for copies above it."""
    options = replace(SimOptions.for_swarm(seed), strict=True, check_every=13, tenant_share=share)
    simulate(seed, 400, replace(options, mix=ComponentMix.FULL))


def answered(manager: WatchedManager, key: PrefixKey, wish: Wish | None = None) -> None:
    """As a request that computes all of it."""
    lease = manager.acquire(manager.match(key), RequestId("r"), wish=wish)
    assert manager.extend(lease, key.num_pages - lease.num_device)
    manager.commit(lease, key)
    manager.release(lease)


def under_pressure(manager: WatchedManager, salt: str = "") -> None:
    """More prompts than the device holds."""
    for seed in range(2, 20):
        answered(manager, PrefixKey(namespace(salt=salt), tokens_for(4, seed)))


def test_what_goes_though_it_is_retained_is_seen_c43(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = watched()
    key = PrefixKey(namespace(), tokens_for(4, seed=1))
    answered(manager, key, Wish(retain_s=60.0, level=1))
    under_pressure(manager)
    assert manager.match(key).num_pages == 4
    monkeypatch.setattr(Retained, "put", lambda *_, **__: False)
    answered(manager, key)  # stands among the others from now on
    with pytest.raises(SimulationError, match=r"C43: room for . pages left 0 of 4"):
        under_pressure(manager)


def test_a_tenant_that_costs_another_a_page_is_seen_c44(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = watched(tenant_share=0.3)
    answered(manager, PrefixKey(namespace(salt="modest"), tokens_for(4, seed=1)))
    under_pressure(manager, "greedy")
    monkeypatch.setattr("quire.manager.core.Core._keep_quota", lambda *_: None)
    with pytest.raises(
        SimulationError, match=r"C44: .'modest'. lost pages of the device to 'greedy'"
    ):
        under_pressure(manager, "greedy")
