"""C24: whatever one rank does, all agree on the shortest prefix, and nobody waits for ever.

In every mix of components: a rank that lacks a window page or a snapshot shortens it as well.
"""

from __future__ import annotations

from random import Random

import pytest

from quire.config import WriteConfig
from quire.manager import Decline, LoadState, PrefetchState
from quire.manager.operations import OperationKind
from quire.messages import Cancel, Fetch, Load, Probe, Probed
from quire.sim import ComponentMix
from quire.sim.faults import Fault
from quire.sim.latency import Latency
from quire.types import Tier, page_ids
from sim.harness import (
    BOTH,
    FULL,
    KEPT_PAGES,
    PAGE,
    RECURRENT,
    WINDOW,
    WINDOW_PAGES,
    Rig,
    with_each_mix,
)
from sim.scripted_faults import RankFails

PROMPT = list(range(12))  # six pages
PAGES = len(PROMPT) // PAGE
FIRST_TURN = 3
"""Pages of a first turn: with recurrent layers only its end and that of PROMPT can be gone on
from; windows reach the store with the turns, so that it has all their pages."""


def stored_rig(mix: ComponentMix, **options: object) -> Rig:
    """A rig whose store holds PROMPT and whose device and host hold nothing."""
    rig = Rig(**{"mix": mix, "ranks": 2, **options})  # type: ignore[arg-type]
    rig.attach()
    rig.serve(PROMPT[: FIRST_TURN * PAGE])
    rig.serve(PROMPT)
    rig.flush(Tier.DEVICE, Tier.HOST)
    return rig


def forget(rig: Rig, component: str, rank: int, page: int) -> None:
    """The store loses one rank's shard of one page."""
    store = rig.stores.open("sim://one")
    key = rig.key(PROMPT).page_keys(page, page + 1)
    del store._objects[key, component, rank]  # type: ignore[index]


def reachable_without(mix: ComponentMix, component: str, page: int) -> int:
    """Pages of PROMPT that can be restored when the store lacks one of a component."""
    points = [0, FIRST_TURN, PAGES] if mix in (RECURRENT, BOTH) else range(PAGES + 1)
    needs = {
        "full": lambda point: page < point,
        "window": lambda point: point - WINDOW_PAGES <= page < point,
        "recurrent": lambda point: page == point - 1,
    }[component]
    return max(point for point in points if not needs(point))


LOST = [
    *((mix, "full", page) for mix in ComponentMix for page in range(PAGES)),
    *((mix, "window", page) for mix in (WINDOW, BOTH) for page in range(PAGES)),
    *((mix, "recurrent", point - 1) for mix in (RECURRENT, BOTH) for point in (FIRST_TURN, PAGES)),
]


@with_each_mix
def test_all_ranks_together_restore_everything_from_the_store_c24(mix: ComponentMix) -> None:
    rig = stored_rig(mix, ranks=3)
    assert rig.serve(PROMPT) == 0
    rig.finish()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("mix", "component", "page"), LOST)
def test_a_page_missing_on_one_rank_shortens_the_prefix_for_all_c19_c24(
    mix: ComponentMix, component: str, page: int, rank: int
) -> None:
    rig = stored_rig(mix, ranks=3)
    forget(rig, component, rank, page)
    lease = rig.begin(PROMPT)
    assert lease.num_device == reachable_without(mix, component, page)
    rig.check(lease)
    rig.manager.release(lease)
    rig.finish()


@pytest.mark.parametrize(("mix", "component", "page"), LOST)
def test_a_page_lost_after_the_probe_brings_what_can_be_used_and_nothing_else_c21_c24(
    mix: ComponentMix, component: str, page: int
) -> None:
    """Up to the last point before it that has all its state, in whatever mix."""
    rig = stored_rig(mix)
    lease = rig.acquire(PROMPT)
    prefetch = rig.manager.prefetch(lease)
    while prefetch.state is not PrefetchState.FETCHING:
        rig.clock.advance(0.001)
        rig.step()
    forget(rig, component, 1, page)
    rig.settle()
    rig.manager.admit(lease)
    rig.manager.load(lease)
    rig.settle()
    assert lease.num_device == reachable_without(mix, component, page)
    rig.check(lease)
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.SHORT, Fault.CORRUPT, Fault.TIMEOUT])
def test_a_rank_that_fails_while_fetching_shortens_the_prefix_for_all_c24(
    fault: Fault, mix: ComponentMix
) -> None:
    rig = stored_rig(mix, faults=RankFails(1, [OperationKind.FETCH], fault))
    lease = rig.begin(PROMPT)
    half_a_batch = fault is Fault.SHORT and mix is FULL  # the others need all that they fetch
    assert lease.num_device == (1 if half_a_batch else 0)
    rig.check(lease)
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
def test_a_rank_that_cannot_load_costs_a_recomputation_on_all_c24(mix: ComponentMix) -> None:
    rig = Rig(mix=mix, ranks=2, faults=RankFails(1, [OperationKind.LOAD]))
    rig.serve(PROMPT)
    rig.flush(Tier.DEVICE)
    lease = rig.begin(PROMPT)
    assert lease.load_state is LoadState.FAILED
    rig.manager.release(lease)
    assert rig.manager.match(rig.key(PROMPT)).num_host == PAGES
    assert rig.serve(PROMPT) == PAGES
    rig.finish()


@with_each_mix
def test_a_backup_that_one_rank_lacks_is_not_on_the_host_c24(mix: ComponentMix) -> None:
    rig = Rig(mix=mix, ranks=2, faults=RankFails(0, [OperationKind.BACKUP], Fault.SHORT))
    rig.serve(PROMPT)
    rig.flush(Tier.DEVICE)
    assert rig.manager.match(rig.key(PROMPT)).num_pages == 0
    rig.finish()


@with_each_mix
def test_a_write_that_one_rank_lacks_is_tried_again_by_all_c24(mix: ComponentMix) -> None:
    rig = Rig(
        mix=mix,
        ranks=2,
        faults=RankFails(1, [OperationKind.WRITE]),
        write=WriteConfig(max_attempts=2, retry_delay_s=0.1, timeout_s=1.0),
    )
    rig.attach()
    rig.serve(PROMPT)
    counters = rig.manager.counters.snapshot()
    due = PAGES + {FULL: 0, WINDOW: KEPT_PAGES, RECURRENT: 1, BOTH: KEPT_PAGES + 1}[mix]
    assert counters["write_retried_pages"] == due
    assert counters["write_failed_pages"] == due
    rig.finish()


@with_each_mix
def test_a_slow_rank_is_waited_for_until_the_deadline_and_no_longer_c24(mix: ComponentMix) -> None:
    rig = stored_rig(mix)
    rig.workers._latency = Latency(Random(7), [1.0, 1e5])
    lease = rig.acquire(PROMPT)
    rig.manager.prefetch(lease)
    rig.step()
    for _ in range(100):
        rig.clock.advance(0.5)
        rig.step()
        if rig.manager.ready(lease):
            break
    assert rig.manager.ready(lease)
    assert lease.prefetch is not None
    assert lease.prefetch.declined is Decline.PROBE_FAILED
    rig.manager.admit(lease)
    assert lease.num_device + lease.num_host == 0
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
def test_pages_landed_while_a_slow_rank_still_fetches_are_those_all_have_c24(
    mix: ComponentMix,
) -> None:
    """Settled early, only pages that every rank has reported are published."""
    rig = stored_rig(mix)
    rig.workers._latency = Latency(Random(7), [0.001, 50.0])
    lease = rig.acquire(PROMPT)
    prefetch = rig.manager.prefetch(lease)
    while prefetch.state is not PrefetchState.FETCHING:
        rig.clock.advance(0.05)
        rig.step()
    rig.clock.advance(0.5)  # the fast rank is done, the slow one is not
    rig.step()
    rig.manager.admit(lease)
    assert prefetch.num_landed < PAGES
    assert any(isinstance(command, Cancel) for command in rig.step())
    rig.settle()
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
def test_a_rank_lost_while_idle_leaves_a_working_device_cache_c24(mix: ComponentMix) -> None:
    rig = stored_rig(mix)
    rig.workers.lose(1, "gone")
    rig.step()
    assert rig.serve(PROMPT) == PAGES
    assert rig.serve(PROMPT) == 0
    rig.finish()


@with_each_mix
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("num_steps", range(0, 14))
def test_a_rank_lost_at_any_moment_of_a_request_hangs_nothing_c24(
    rank: int, num_steps: int, mix: ComponentMix
) -> None:
    rig = stored_rig(mix, seed=num_steps)
    lease = rig.acquire(PROMPT)
    rig.manager.prefetch(lease)
    for at in range(20):
        if at == num_steps:
            rig.workers.lose(rank, "gone")
        if at == 8:
            rig.manager.admit(lease)
            rig.manager.load(lease)
        rig.clock.advance(0.02)
        rig.step()
    rig.settle()
    assert lease.load_state is not LoadState.LOADING
    if lease.load_state is LoadState.IDLE:
        rig.check(lease)
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
def test_a_probe_is_not_sent_to_a_rank_known_to_be_lost_c24(mix: ComponentMix) -> None:
    rig = stored_rig(mix)
    lease = rig.acquire(PROMPT)
    prefetch = rig.manager.prefetch(lease)  # queued, and then the rank dies before the step
    rig.workers.lose(1, "gone")
    rig.sent.clear()
    rig.step()
    assert not any(isinstance(command, Probe) for command in rig.sent)
    assert prefetch.declined is Decline.WORKER_LOST
    rig.manager.release(lease)
    rig.finish()


@with_each_mix
def test_a_probe_answered_by_all_before_a_rank_was_lost_starts_no_fetch_c24(
    mix: ComponentMix,
) -> None:
    """The lost rank's answer is in, so the probe succeeds; but a fetch could never end."""
    rig = stored_rig(mix)
    lease = rig.acquire(PROMPT)
    prefetch = rig.manager.prefetch(lease)
    probes = [command for command in rig.step() if isinstance(command, Probe)]
    rig.workers.lose(1, "gone")
    lost = rig.workers.poll()
    rig.sent.clear()
    theirs, mine = ([answer(probe, rank) for probe in probes] for rank in (1, 0))
    rig.sent += rig.manager.step([*theirs, *lost, *mine])
    assert not any(isinstance(command, Fetch) for command in rig.sent)
    assert prefetch.declined is Decline.WORKER_LOST
    rig.manager.release(lease)
    rig.finish()


def answer(probe: Probe, rank: int) -> Probed:
    """The store has everything."""
    if probe.each:
        return Probed(probe.op, rank, probe.component, present=[b"\1" * PAGES])
    return Probed(probe.op, rank, probe.component, hits=[PAGES])


@with_each_mix
def test_a_write_waiting_to_be_retried_when_a_rank_is_lost_wakes_nobody_for_ever_c24(
    mix: ComponentMix,
) -> None:
    rig = Rig(mix=mix, ranks=2, faults=RankFails(1, [OperationKind.WRITE]))
    rig.attach()
    lease = rig.begin(PROMPT)
    rig.compute(lease)
    rig.manager.release(lease)
    while not rig.manager.counters.snapshot().get("write_retried_pages"):
        rig.clock.advance(0.01)
        rig.step()
    assert rig.manager.next_wakeup() is not None
    rig.workers.lose(1, "gone")
    rig.step()
    assert rig.manager.next_wakeup() is None or rig.manager.next_wakeup() > rig.clock()
    rig.finish()


@with_each_mix
def test_every_rank_is_told_the_same_pages_c24(mix: ComponentMix) -> None:
    """One command for all ranks: pools have the same page numbers everywhere."""
    rig = stored_rig(mix, ranks=3, rank_factors=[0.1, 1.0, 7.0])
    lease = rig.begin(PROMPT)
    loads = [command for command in rig.sent if isinstance(command, Load)]
    assert b"".join(load.device for load in loads if load.component == "full") == lease.pages
    for load in loads:
        if lease.state is not None and load.component == "window":
            assert lease.state.window is not None
            assert load.device == lease.state.window.pages
        elif lease.state is not None and load.component == "recurrent":
            assert lease.state.recurrent is not None
            assert load.device == page_ids([lease.state.recurrent.restore])
    rig.check(lease)
    rig.manager.release(lease)
    rig.finish()
