"""Streams: a hit that the host cannot hold at once comes through it in parts. Whatever becomes of
these, the request goes on from what has come, and everything comes back (C51)."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.config import PrefetchPolicy
from quire.manager import Lease
from quire.messages import Fetch, Load
from quire.types import PageStatus, num_pages, split_keys
from support import Rig

PAGES = 40
HOST_PAGES = 10
WAIT = {"policy": PrefetchPolicy.WAIT_COMPLETE}


def streaming(mix: str, ranks: int = 1) -> tuple[Rig, Lease]:
    """A request that has its device pages, and a hit four times the host."""
    rig = Rig(mix=mix, device=2 * PAGES, host=HOST_PAGES, ranks=ranks, prefetch=WAIT)
    key = rig.doc(PAGES, seed=1)
    rig.cache_in_store(key)
    lease = rig.acquire(key)
    rig.manager.prefetch(lease)
    rig.run()
    rig.manager.admit(lease)
    rig.manager.load(lease)
    assert rig.manager.begin(lease)
    assert rig.manager.extend(lease, PAGES - lease.num_device)
    assert rig.manager.stream(lease)
    return rig, lease


def finish(rig: Rig, lease: Lease) -> None:
    rig.manager.release(lease)
    rig.run()
    assert rig.manager.idle
    assert rig.inflight_pages == 0
    rig.manager.check_invariants()


def test_all_of_the_hit_is_used_and_the_host_is_free_again_c51(mix: str) -> None:
    rig, lease = streaming(mix)
    for _ in range(PAGES):
        rig.run()
    assert lease.stream is None
    assert lease.num_device == PAGES
    assert rig.manager.counters.streamed_pages >= PAGES - HOST_PAGES
    finish(rig, lease)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_becomes_of_the_parts_no_page_is_lost_or_taken_for_come_c51(
    mix: str, seed: int
) -> None:
    """Parts arrive in pieces, out of order, damaged, too late, or never while anybody waits."""
    rng = random.Random(seed)
    rig, lease = streaming(mix, ranks=1 + seed % 2)
    abort_after = rng.randrange(40) if seed % 4 == 0 else None
    outcomes: dict[Fetch | Load, list[int]] = {}
    for number in itertools.count():
        if lease.stream is None or number == abort_after:
            break
        assert number < 1_000, "it never ends"
        rig.step()
        commands = [c for c in rig.pending if isinstance(c, Fetch | Load)]
        if not commands or (seed % 3 == 0 and rng.random() < 0.15):
            rig.now += 70.0  # all that is under way is overdue
            continue
        command = rng.choice(commands)
        statuses = outcomes.setdefault(command, outcome(rng, num_pages(command.host)))
        if isinstance(command, Fetch) and rng.random() < 0.3:  # half of it, for now
            rig.answer(command, statuses=statuses[: len(statuses) // 2], final=False)
        else:
            rig.pending.remove(command)
            rig.answer(command, statuses=statuses)
    finish(rig, lease)
    found = split_keys(lease.key.page_keys(0, rig.manager.match(lease.key).num_pages))
    for command, statuses in outcomes.items():
        if isinstance(command, Fetch) and command.component == "full":
            keys = split_keys(command.keys)
            assert not {k for k, s in zip(keys, statuses, strict=True) if s} & set(found)


def outcome(rng: random.Random, count: int) -> list[int]:
    statuses = [0] * count
    if rng.random() < 0.1:
        statuses[rng.randrange(count)] = PageStatus.CORRUPT
    return statuses
