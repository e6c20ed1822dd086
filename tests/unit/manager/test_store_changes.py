"""Attach, detach and clear at run time (C18), events, and options that contradict."""

from __future__ import annotations

import pytest

from quire.config import CacheConfig, PrefetchConfig, WriteConfig, WritePolicy
from quire.errors import ConfigError, StoreError
from quire.manager import Decline, EventKind, StoreState
from quire.messages import (
    AttachStore,
    Backup,
    ClearStore,
    DetachStore,
    Fetch,
    Probe,
    StoreChanged,
    Write,
)
from quire.types import Tier, num_pages
from support import OK, Rig


def test_detach_in_mid_fetch_fails_no_request_c18(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.step()
    rig.answer_all(Probe)
    fetches = rig.take_all(Fetch)
    change = rig.manager.store.detach()
    rig.step()
    rig.answer(rig.take(DetachStore))
    assert change.done
    assert not change.error
    for fetch in fetches:
        rig.answer(fetch, statuses=[OK] * num_pages(fetch.host))  # ends on the store it began with
    assert rig.manager.admit(lease) == 6
    rig.manager.release(lease)
    later = rig.acquire(rig.doc(4, seed=2))
    assert rig.manager.prefetch(later).declined is Decline.NO_STORE
    rig.manager.release(later)


def test_detach_between_probe_and_answer_declines_c18(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(6, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    prefetch = rig.manager.prefetch(lease)
    rig.step()
    probes = rig.take_all(Probe)
    rig.manager.store.detach()
    for probe in probes:
        rig.answer(probe)
    assert prefetch.declined is Decline.NO_STORE
    rig.run()
    rig.manager.release(lease)


def test_write_in_flight_over_a_store_change_does_not_count_for_the_new_store_c18(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(3, seed=1)
    rig.manager.release(rig.compute(key))
    rig.step()
    rig.answer_all(Backup)
    writes = rig.take_all(Write)
    assert [write.component for write in writes] == rig.parts
    rig.manager.store.attach("memory://other")
    rig.run()
    for write in writes:
        rig.answer(write)
    rig.empty_store()  # the other one
    rig.manager.release(rig.acquire(key))
    rig.run()
    assert rig.in_store(key)  # written there too


def test_clear_forgets_what_was_stored_c18(mix: str) -> None:
    rig = Rig(mix=mix)
    key = rig.doc(3, seed=1)
    rig.cache(key)
    assert rig.manager.store.clear().url == "memory://"
    rig.run()
    assert not any(rig.stored.values())
    rig.manager.release(rig.acquire(key))
    rig.run()
    assert rig.in_store(key)


def test_a_clearing_that_takes_long_or_fails_leaves_the_store_attached_c18(mix: str) -> None:
    rig = Rig(mix=mix, ranks=2)
    key = rig.doc(3, seed=1)
    late = rig.manager.store.clear()
    rig.step()
    clear = rig.take(ClearStore)
    rig.step([StoreChanged(clear.op, 0)])
    rig.now += 3600
    rig.step()
    assert (late.done, "in time" in late.error) == (True, True)
    rig.step([StoreChanged(clear.op, 1)])
    failed = rig.manager.store.clear()
    rig.step()
    clear = rig.take(ClearStore)
    rig.step([StoreChanged(clear.op, 0), StoreChanged(clear.op, 1, "disk on fire")])
    assert failed.error == "disk on fire"
    assert rig.manager.store.state is StoreState.ATTACHED
    rig.cache(key)
    assert rig.in_store(key)


def test_attach_that_fails_on_one_rank_leaves_no_rank_attached_c18(mix: str) -> None:
    rig = Rig(mix=mix, ranks=2, store=False)
    change = rig.manager.store.attach("file:///nowhere")
    rig.step()
    attach = rig.take(AttachStore)
    rig.step([StoreChanged(attach.op, 0), StoreChanged(attach.op, 1, "no such directory")])
    assert change.error == "no such directory"
    assert rig.has(DetachStore)
    rig.run()
    assert change.done
    assert rig.manager.store.state is StoreState.DETACHED
    lease = rig.compute(rig.doc(3, seed=1))
    rig.manager.release(lease)
    rig.run()
    assert rig.manager.counters.written_pages == 0


@pytest.mark.parametrize("late", [False, True], ids=["fails", "late"])
def test_after_a_change_that_failed_the_next_is_welcome_as_soon_as_it_is_done(late: bool) -> None:
    rig = Rig(ranks=2)
    change = rig.manager.store.attach("file:///nowhere")
    rig.step()
    attach = rig.take(AttachStore)
    if late:
        rig.now += 61
        rig.step()
    rig.step([StoreChanged(attach.op, rank, "no such directory") for rank in range(2)])
    detach = rig.take(DetachStore)
    assert change.error
    assert not change.done  # or the next one would be refused
    rig.step([StoreChanged(detach.op, 0)])
    assert not change.done
    rig.step([StoreChanged(detach.op, 1)])
    assert change.done
    again = rig.manager.store.attach("memory://")
    rig.run()
    assert (again.done, again.error) == (True, "")
    assert rig.manager.store.state is StoreState.ATTACHED


def test_a_change_that_cannot_be_undone_in_time_is_done_all_the_same() -> None:
    rig = Rig()
    change = rig.manager.store.attach("file:///nowhere")
    rig.step()
    attach = rig.take(AttachStore)
    rig.step([StoreChanged(attach.op, 0, "no such directory")])
    detach = rig.take(DetachStore)
    rig.now += 61
    rig.step()
    assert (change.done, change.error) == (True, "no such directory")
    rig.manager.store.attach("memory://")
    rig.step([StoreChanged(detach.op, 0)])  # late: it is not the answer to the new change
    assert rig.manager.store.state is StoreState.CHANGING
    rig.run()
    assert rig.manager.store.state is StoreState.ATTACHED


def test_changing_the_store_twice_at_once_is_refused() -> None:
    rig = Rig()
    rig.manager.store.detach()
    with pytest.raises(StoreError, match="wait for that"):
        rig.manager.store.attach("memory://")
    rig.run()
    rig.manager.store.attach("memory://")
    rig.run()
    assert rig.manager.store.state is StoreState.ATTACHED


def test_clearing_without_a_store_says_what_to_do() -> None:
    with pytest.raises(StoreError, match="attach one first"):
        Rig(store=False).manager.store.clear()


def test_events_tell_every_change_per_tier() -> None:
    rig = Rig(event_buffer=100)
    key = rig.doc(3, seed=1)
    rig.cache(key)
    rig.manager.flush(Tier.DEVICE)
    rig.manager.flush(Tier.HOST)
    told = [(e.kind, e.tier) for e in rig.manager.events.take().events]
    assert told == [
        (EventKind.STORED, "device"),
        (EventKind.STORED, "host"),
        (EventKind.STORED, "store"),
        (EventKind.REMOVED, "device"),
        (EventKind.REMOVED, "host"),
    ]


def test_event_buffer_is_bounded_and_says_what_it_lost() -> None:
    rig = Rig(event_buffer=4, store=False)
    for seed in range(5):
        rig.cache(rig.doc(1, seed=seed))
    batch = rig.manager.events.take()
    assert (len(batch.events), batch.lost) == (4, 6)
    assert rig.manager.events.take().lost == 0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"page_size": 0}, "page_size"),
        ({"device_pages": 0}, "device_pages"),
        ({"host_pages": -1}, "host_pages"),
        (
            {"host_pages": 0, "write": WriteConfig(policy=WritePolicy.WRITE_BACK)},
            "write.policy.*host_pages",
        ),
        (
            {"host_pages": 8, "prefetch": PrefetchConfig(threshold_tokens=1000)},
            "prefetch.threshold_tokens.*raise host_pages",
        ),
    ],
)
def test_contradictory_options_name_the_option_and_the_fix(
    options: dict[str, object], names: str
) -> None:
    values: dict[str, object] = {"page_size": 4, "device_pages": 8, "host_pages": 800}
    with pytest.raises(ConfigError, match=names):
        CacheConfig(**(values | options))  # type: ignore[arg-type]


def test_store_without_a_host_tier_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_pages"):
        Rig(host=0, store=False).manager.store.attach("memory://")


@pytest.mark.parametrize(
    "bad",
    [
        lambda: WriteConfig(low_watermark=0.5, high_watermark=0.1),
        lambda: WriteConfig(selective_hits=0),
        lambda: PrefetchConfig(base_timeout_s=20.0, max_timeout_s=10.0),
        lambda: PrefetchConfig(max_inflight_share=0.0),
    ],
)
def test_impossible_values_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"write\.|prefetch\."):
        bad()  # type: ignore[operator]
