"""Retention and quotas under random pressure, in virtual time: what was promised is found, and
nobody pays for another. By seed, over all mixes of state, orders of eviction, and tiers; the store
is one of files.

Who breaks a promise here is told by what a user would notice: a prefix that is not found.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.eviction import EvictionKind
from quire.keys import PrefixKey
from quire.manager import Wish
from quire.messages import Command, Completion, Fetch, Probe, Touch, Write
from quire.sim import SimOptions, simulate
from quire.store.base import HEADER_BYTES, Part
from quire.store.client import PageStore
from quire.store.file import FileStore
from quire.types import split_keys
from support import MIXES, Rig, namespace, tokens_for

PAGES = 64
"""Of a tier."""
DOC = 4


FOUND: list[tuple[int, int, dict[str, Any]]] = [
    (3995416332, 900, {"tenant_share": 0.3}),
    (3995416836, 720, {"store_pages": 123, "lane_pages_s": 200.0, "arrivals": 0.3}),
    (3995417184, 1170, {"lane_pages_s": 30.0, "arrivals": 0.1}),
    (3995417352, 110, {"lane_pages_s": 30.0, "arrivals": 0.1}),
    (3995417412, 1020, {"lane_pages_s": 30.0, "tenant_share": 0.3}),
    (3995418456, 1420, {"store_pages": 153}),
    (3995418516, 1500, {"lane_pages_s": 30.0, "tenant_share": 0.3}),
    (1957849862, 1500, {"lane_pages_s": 200.0, "tenant_share": 0.3}),
]
"""Seed, steps and options of runs of a swarm that broke a promise, or said so wrongly."""


def doc(tenant: str, seed: int, pages: int = DOC) -> PrefixKey:
    return PrefixKey(namespace(salt=tenant), tokens_for(pages, seed))


def found(rig: Rig, key: PrefixKey) -> int:
    return rig.manager.match(key).num_pages


def world(rng: Random, **options) -> Rig:
    host = rng.choice((0, PAGES, 2 * PAGES))
    return Rig(
        mix=rng.choice(MIXES),
        device=PAGES,
        host=host,
        store=host > 0 and rng.random() < 0.3,
        eviction=rng.choice(list(EvictionKind)),
        **options,
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_is_retained_is_found_for_as_long_as_was_asked(seed: int) -> None:
    rng = Random(seed)
    rig = world(rng)
    until: dict[int, float] = {}
    most = PAGES // 4 // DOC - 1  # a share of the tier, and no more of it than is asked for
    for number in range(40):
        rig.now += rng.random() * 4
        held = [each for each, end in until.items() if end > rig.now]
        luck = rng.random()
        if luck < 0.15 and len(held) < most:
            retain_s = rng.choice((5.0, 20.0, 60.0))
            rig.cache(doc("", number), wish=Wish(retain_s, rng.choice((1, 2))))
            until[number] = rig.now + retain_s
        elif luck < 0.3 and held:
            again = rng.choice(held)
            rig.cache(doc("", again), wish=Wish(60.0, 1))
            until[again] = rig.now + 60.0
        else:
            for i in range(rng.randrange(1, 12)):
                wish = rng.choice((None, None, Wish(level=-1, retain_s=300.0)))
                rig.cache(doc("", 10_000 + 100 * number + i, rng.randrange(1, 7)), wish=wish)
        for each, end in until.items():
            if end > rig.now:
                assert found(rig, doc("", each)) == DOC, f"{each} at {rig.now}, until {end}"
    rig.manager.check_invariants()
    assert until, "nothing was asked for"


@pytest.mark.parametrize("seed", range(5))
def test_a_tenant_at_its_quota_costs_nobody_a_page(seed: int) -> None:
    """Two modest tenants have less than their share each; a greedy one asks for everything."""
    rng = Random(1000 + seed)
    rig = world(rng, tenant_share=0.3)
    quota = int(PAGES * 0.3)
    modest = {name: [doc(name, i) for i in range(quota // DOC - 1)] for name in ("ann", "bob")}
    for keys in modest.values():
        for key in keys:
            rig.cache(key)
    for number in range(40):
        rig.now += rng.random()
        rig.cache(
            doc("greedy", number, rng.randrange(1, 9)), wish=rng.choice((None, Wish(60.0, 2)))
        )
        device, _ = rig.manager.pages_of(namespace(salt="greedy"))
        assert device <= quota
        if rng.random() < 0.2:
            rig.cache(rng.choice(modest[rng.choice(("ann", "bob"))]))
    for name, keys in modest.items():
        assert [found(rig, key) for key in keys] == [DOC] * len(keys), name
    rig.manager.check_invariants()


class OnFiles(Rig):
    """Its store is a directory with room for so many pages."""

    def __init__(self, folder: Path, *, room: int, **options: Any) -> None:
        self.now = 0.0
        self.files = FileStore(
            folder, max_bytes=room * 2 * HEADER_BYTES, reserve_bytes=0, wall_ns=self._wall_ns
        )
        assert self.files.wait_scanned(30)
        self.pages = PageStore(self.files, clock=time.monotonic, wall_ns=self._wall_ns)
        super().__init__(**options)

    def _wall_ns(self) -> int:
        return int((1e9 + self.now) * 1e9)

    def reports(self, command: Command, **how: Any) -> list[Completion]:
        if isinstance(command, Touch):
            part = self._part(command.component)
            self.pages.touch(part, split_keys(command.keys), each=command.each)
        elif isinstance(command, Write):
            keys, parents = command.keys_and_parents()
            content = [memoryview(mmap.mmap(-1, HEADER_BYTES)) for _ in keys]
            how["statuses"] = self.pages.put(
                self._part(command.component),
                keys,
                content,
                parents=parents,
                owners=command.owners(),
                deadline=time.monotonic() + 60,
            )
        elif isinstance(command, Probe | Fetch):
            self.look()
        return super().reports(command, **how)

    def look(self) -> None:
        """What is there; looking does not count as use."""
        self.empty_store()
        for each in self.files.scan():
            self.stored[each.name.component].add(each.name.key)

    def num_there(self, key: PrefixKey) -> int:
        return sum(each in self.stored["full"] for each in split_keys(key.page_keys()))

    def close(self) -> None:
        self.pages.close()

    def _part(self, component: str) -> Part:
        return Part(component, 0, 1, b"f" * 32, HEADER_BYTES)


@pytest.fixture
def on_files(tmp_path: Path) -> Iterator[Callable[..., OnFiles]]:
    made: list[OnFiles] = []

    def make(**options: Any) -> OnFiles:
        made.append(OnFiles(tmp_path / "store", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("tiers", [(True, True), (False, False)])
def test_what_is_retained_is_found_in_the_store_until_its_time_is_over(
    on_files: Callable[..., OnFiles], mix: str, tiers: tuple[bool, bool]
) -> None:
    """Many more pages than all three tiers hold pass by; of the plain one nothing is left."""
    room = 24 * len(mix.split("+"))
    rig = on_files(mix=mix, device=24, host=32, room=room, retained_share=0.5)
    kept, plain = doc("", 1), doc("", 2)
    rig.cache(kept, wish=Wish(60.0, 1, tiers=tiers))
    rig.cache(plain)
    while rig.now < 58.0:
        rig.now += 2.0
        rig.cache(doc("", 1000 + int(rig.now)))
        rig.look()
        assert rig.in_store(kept), rig.now
    assert not rig.in_store(plain)
    if not any(tiers):
        assert found(rig, kept) == 0, "nowhere else was it to be kept"
    while rig.now < 120.0:
        rig.now += 2.0
        rig.cache(doc("", 1000 + int(rig.now)))
    rig.look()
    assert not rig.in_store(kept)
    rig.manager.check_invariants()


def test_a_range_of_a_prompt_is_kept_in_the_store_for_its_own_time(
    on_files: Callable[..., OnFiles],
) -> None:
    rig = on_files(device=24, host=32, room=24, retained_share=0.5)
    kept = doc("", 1, pages=8)
    rig.cache(kept, wish=Wish(60.0, 1, num_pages=2, then=Wish(20.0, 1, num_pages=6)))
    numbers = {}
    while rig.now < 120.0:
        rig.now += 2.0
        rig.cache(doc("", 1000 + int(rig.now)))
        rig.look()
        numbers[rig.now] = rig.num_there(kept)
    assert (numbers[18.0], numbers[56.0], numbers[120.0]) == (6, 2, 0)


def test_no_more_is_kept_in_the_store_than_in_memory(on_files: Callable[..., OnFiles]) -> None:
    """Everybody asks for everything: of what was asked for last, and of others, all is found."""
    rig = on_files(device=24, host=24, room=48, retained_share=0.25)
    for seed in range(30):
        rig.now += 2.0
        rig.cache(doc("", seed), wish=Wish(3600.0, 2))
    others = [doc("", 100 + i) for i in range(6)]
    for key in others:
        rig.now += 2.0
        rig.cache(key)
    rig.look()
    assert all(map(rig.in_store, others))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(2))
def test_a_tenant_at_its_quota_costs_nobody_a_page_of_the_store(
    on_files: Callable[..., OnFiles], mix: str, seed: int
) -> None:
    rng = Random(seed)
    num_parts = len(mix.split("+"))
    rig = on_files(mix=mix, device=64, host=64, room=64 * num_parts, tenant_share=0.3)
    modest = [doc(name, i) for name in ("ann", "bob") for i in range(3)]
    for key in modest:
        rig.cache(key)
    greedy = [doc("greedy", 100 + i, rng.randrange(1, 7)) for i in range(60)]
    for i, key in enumerate(greedy):
        rig.now += rng.random() * 3
        rig.cache(key, wish=rng.choice((None, Wish(60.0, 2))))
        rig.look()
        assert all(map(rig.in_store, modest)), i
        assert sum(map(rig.num_there, greedy)) <= 64 * num_parts * 0.3
    assert rig.in_store(greedy[-1]), "what it wrote last it has"
    use = rig.manager.store.use_of("greedy")
    assert use.num_written > 64 * 0.3
    rig.manager.check_invariants()


def test_what_a_tenant_may_not_write_is_counted(on_files: Callable[..., OnFiles]) -> None:
    """A path longer than its quota: the beginning is there, and nothing behind a hole."""
    rig = on_files(device=64, host=64, room=32, tenant_share=0.25)
    long = doc("greedy", 1, pages=14)
    rig.cache(long)
    rig.look()
    num_there = rig.num_there(long)
    assert 0 < num_there <= 8
    assert rig.in_store(long[:num_there])
    assert rig.manager.store.use_of("greedy").num_refused > 0


@pytest.mark.parametrize(("seed", "steps", "options"), FOUND)
def test_what_a_swarm_found_stays_right(seed: int, steps: int, options: dict[str, Any]) -> None:
    simulate(seed, steps, replace(SimOptions.from_seed(seed), strict=True, **options))
