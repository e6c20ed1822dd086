"""Simulations in which things run out: the store's room, what lanes and links carry."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from quire.disagg.asking import Asking
from quire.disagg.handover import Handover
from quire.sim import ComponentMix, SimOptions, SimulationError, simulate
from quire.sim.bandwidth import SimLane, SimLinks
from quire.sim.clock import VirtualClock
from quire.sim.pd.options import SimPdOptions, Topology
from quire.sim.pd.run import simulate_pd
from quire.sim.run import Simulation
from quire.sim.store import SimStore, SimStores
from quire.types import NO_PARENT, Owner, PageKey, PageStatus

# ---- a store with a budget -----------------------------------------------------------------------


def keys(count: int, name: str = "a") -> list[PageKey]:
    return [PageKey(f"{name}{i}".encode().ljust(32, b".")) for i in range(count)]


def put_all(store: SimStore, prefix: list[PageKey], rank: int = 0) -> list[PageStatus]:
    parents = [NO_PARENT, *prefix]
    return [
        store.put((key, "full", rank), 1, parent)
        for key, parent in zip(prefix, parents, strict=False)
    ]


def has(store: SimStore, prefix: list[PageKey], rank: int = 0) -> int:
    """Leading pages that are there, without using them."""
    present = [store.get((key, "full", rank)) is not None for key in prefix]
    return [*present, False].index(False)


def test_what_is_left_of_a_prefix_at_the_budget_is_its_beginning_c36() -> None:
    store = SimStore(max_objects=12)
    first, second = keys(8, "a"), keys(8, "b")
    put_all(store, first)
    put_all(store, second)
    assert len(store) == store.num_usable() == 12
    assert (has(store, first), has(store, second)) == (4, 8)


def test_what_is_used_elsewhere_stays_c36() -> None:
    store = SimStore(max_objects=12)
    first, second, third = keys(6, "a"), keys(6, "b"), keys(3, "c")
    put_all(store, first)
    put_all(store, second)
    store.touch(first, "full", 0)
    put_all(store, third)
    assert (has(store, first), has(store, second), has(store, third)) == (6, 3, 3)


def test_a_page_without_the_page_before_it_is_not_taken_and_a_hole_is_filled_again_c36() -> None:
    store, prefix = SimStore(), keys(4)
    put_all(store, prefix)
    assert store.forget(Random(1), 1) == 1
    lost = prefix[has(store, prefix)]
    assert store.num_usable() == has(store, prefix)
    child = PageKey(b"child".ljust(32, b"."))
    assert store.put((child, "full", 0), 1, lost) is PageStatus.ORPHAN
    assert put_all(store, prefix) == [PageStatus.OK] * 4
    assert store.num_usable() == 4


def test_looking_refreshes_only_what_can_be_reached() -> None:
    store = SimStore(max_objects=4)
    prefix, other = keys(3, "a"), keys(2, "b")
    for key in prefix[::2]:  # there is a hole
        store.put((key, "full", 0), 1)
    put_all(store, other)
    assert store.present(prefix, "full", 0) == b"\1\0\1"
    store.put((PageKey(b"new".ljust(32, b".")), "full", 0), 1)
    assert store.get((prefix[0], "full", 0)) is not None
    assert store.get((prefix[2], "full", 0)) is None


def test_the_stores_of_a_cluster_have_one_budget_each() -> None:
    stores = SimStores(max_objects=2)
    assert stores.open("sim://a") is stores.open("sim://a")
    put_all(stores.open("sim://a"), keys(3))
    put_all(stores.open("sim://b"), keys(2))
    assert stores.counters() == {"store objects": 4, "store usable": 4, "store evicted": 1}


# ---- lanes and links -----------------------------------------------------------------------------


def test_a_lane_carries_one_after_the_other() -> None:
    clock = VirtualClock()
    lane = SimLane(clock, 10.0)
    assert [lane.carry_s(5), lane.carry_s(5)] == [0.5, 1.0]
    clock.advance(0.75)
    assert lane.carry_s(5) == 0.75
    clock.advance(10.0)
    assert lane.carry_s(1) == pytest.approx(0.1)
    assert SimLane(clock, 0.0).carry_s(1_000_000) == 0.0


def test_a_link_is_shared_by_all_who_send_over_it_and_all_who_get() -> None:
    links = SimLinks(VirtualClock(), 10.0)
    assert links.enter("a", "b", 10).left_s() == 1.0
    assert links.enter("a", "c", 10).left_s() == 2.0  # behind what a sends to b
    assert links.enter("d", "b", 10).left_s() == 2.0
    assert links.enter("e", "f", 10).left_s() == 1.0
    assert links.enter("b", "a", 10).left_s() == 1.0  # the other way there is nothing


def test_who_is_not_wanted_any_more_holds_up_nobody() -> None:
    clock = VirtualClock()
    links = SimLinks(clock, 10.0)
    first, second, third = (links.enter("a", "b", 10) for _ in range(3))
    clock.advance(0.25)
    second.leave()
    assert [first.left_s(), third.left_s()] == [0.75, 1.75]
    first.leave()
    assert third.left_s() == 1.0
    clock.advance(1.0)
    assert third.left_s() == 0.0
    assert links.enter("a", "b", 10).left_s() == 1.0


# ---- arrivals that do not wait for answers -------------------------------------------------------


def test_requests_come_alone_and_together_however_many_there_are() -> None:
    run = Simulation(3, replace(SimOptions.from_seed(3), concurrency=1, arrivals=0.5))
    most, together = 0, 0
    for _ in range(100):
        run.step()
        prompts = [request.prompt for request in run.engine.requests]
        most = max(most, len(prompts))
        together = max([together, *(prompts.count(prompt) for prompt in prompts)])
    run.drain()
    assert most > 4
    assert together > 1


# ---- all of it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", ComponentMix, ids=lambda mix: mix.value)
def test_a_cache_that_is_short_of_everything_breaks_no_rule(mix: ComponentMix) -> None:
    options = SimOptions(mix=mix, store_pages=60, lane_pages_s=60.0, arrivals=0.2)
    report = simulate(2, 1_000, options)
    assert report.counters["store evicted"] > 0
    assert report.tally.finished > 0


@pytest.mark.parametrize("topology", Topology, ids=lambda topology: topology.value)
def test_a_cluster_that_is_short_of_everything_breaks_no_rule(topology: Topology) -> None:
    scarce = SimPdOptions(
        topology=topology,
        prefills=2,
        decodes=2,
        store_pages=20,
        lane_pages_s=200.0,
        link_pages_s=100.0,
        arrivals=0.05,
        abort_rate=0.01,
    )
    counters = simulate_pd(4, 500, scarce).counters
    assert counters["store evicted"] > 0
    assert counters["received_pages"] > 0
    assert counters["finish length"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_swarm_draws_what_runs_out_and_leaves_the_rest_to_the_seed(seed: int) -> None:
    for kind in (SimOptions, SimPdOptions):
        default, drawn = kind.from_seed(seed), kind.for_swarm(seed)
        same = replace(
            drawn, strict=False, check_every=1, store_pages=0, lane_pages_s=0.0, arrivals=0.0
        )
        if isinstance(same, SimPdOptions):
            same = replace(same, link_pages_s=0.0)
        else:
            same = replace(same, tenant_share=1.0)
        assert same == default
        assert kind.for_swarm(seed) == drawn


# ---- decode computes only if no healthy way was left ---------------------------------------------


def test_a_prompt_that_decode_computes_though_a_prefill_server_is_well_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_up(self: Asking, handover: Handover, _now: float) -> None:
        self._fail(handover)

    monkeypatch.setattr(Asking, "ask", give_up)
    rarely = SimPdOptions(cut_rate=1e-9)  # it is not calm, and nothing happens
    with pytest.raises(SimulationError, match=r"by decode0\.2, and prefill0\.1 could do it"):
        simulate_pd(1, 300, rarely)


def test_a_prompt_may_be_computed_by_decode_when_its_only_line_is_cut() -> None:
    counters = simulate_pd(1, 400, SimPdOptions(cut_rate=0.05)).counters
    assert counters["handover local"] > 0


def test_who_has_its_share_of_a_store_makes_room_among_its_own() -> None:
    store, greedy = SimStore(8), Owner("greedy", 0.25)
    names = [(PageKey(bytes([n]).ljust(32, b".")), "full", 0) for n in range(12)]
    for name in names[:6]:
        store.put(name, 1)
    for name in names[6:]:
        assert store.put(name, 1, None, greedy) is PageStatus.OK
    assert {name for name, _ in store.objects()} == {*names[:6], *names[10:]}
