"""C32 with everything at once, by seed. `QUIRE_CHAOS_S=600`: so long with fresh seeds."""

import time
from pathlib import Path

import pytest

from e2e.exactness.chaos import FRESH_S, Chaos
from e2e.exactness.rig import engine_rig
from quire.manager import Way


def check(seed: int, folder: Path) -> None:
    chaos = Chaos(seed)
    store = chaos.store(str(folder / f"store-{seed}"))
    for life in range(2):
        pools, options = chaos.pools(), chaos.options()
        way = chaos.random.choice(list(Way))
        print(f"seed {seed}, life {life}: {chaos.subject}, {way}, {store}, {pools}, {options}")
        with engine_rig(chaos.subject, store=store, way=way, **pools, **options) as rig:
            chaos.run(rig, rounds=chaos.random.randint(4, 8))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_answer_is_the_same_c32(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.long
def test_whatever_happens_with_seeds_that_nobody_has_run_c32(tmp_path: Path) -> None:
    seed, until = time.time_ns() // 1_000_000, time.monotonic() + FRESH_S
    while time.monotonic() < until:
        seed += 1
        check(seed, tmp_path)
