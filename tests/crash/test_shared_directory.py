"""Eight engines' processes on one directory at its budget, some of them killed: what is stored is
of use (C36)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash.engines import OBJECT_BYTES, usable_share, used_bytes
from quire.store.file import FileStore

NUM_ENGINES = 8
NUM_PAGES = 1500


def start(root: Path, seed: int, num_turns: int) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, str(here / "engines.py"), str(root), str(seed), str(num_turns), "1500"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def play(root: Path, seed: int, num_turns: int, num_kills: int, until_s: float = 0.0) -> None:
    """Each engine plays its turns, some not to the end: those are killed while they play, and
    others come in their place; with `until_s`, for so many seconds."""
    chance = random.Random(seed)
    began = time.monotonic()
    engines = [start(root, seed * 1000 + i, num_turns) for i in range(NUM_ENGINES)]
    next_seed = seed * 1000 + NUM_ENGINES
    while num_kills > 0 or time.monotonic() < began + until_s:
        victim = chance.randrange(NUM_ENGINES)
        lines = engines[victim].stdout
        assert lines is not None
        for _ in range(chance.randrange(1, max(2, min(num_turns // 20, 20)))):
            lines.readline()
        engines[victim].kill()
        engines[victim].communicate()
        engines[victim] = start(root, next_seed, num_turns)
        next_seed += 1
        num_kills -= 1
    for engine in engines:
        if until_s:
            engine.kill()
        engine.communicate()
        assert until_s or engine.returncode == 0


def check(root: Path) -> float:
    store = FileStore(root, max_bytes=NUM_PAGES * OBJECT_BYTES, reserve_bytes=0)
    assert store.wait_scanned(300)
    assert store.stats().used_bytes == used_bytes(root)
    store.close()
    num_usable, num_there = usable_share(root)
    # What eight processes write before they hear of each other (a thousandth of the budget each),
    # and what changed while one of them counted.
    assert 0.9 * NUM_PAGES <= num_there <= 1.05 * NUM_PAGES
    return num_usable / num_there


def test_what_eight_engines_store_is_of_use_though_some_are_killed_c36(tmp_path: Path) -> None:
    root = tmp_path / "store"
    play(root, seed=1, num_turns=60, num_kills=6)
    share = check(root)
    print(f"usable share {share:.4f}")
    assert share >= 0.95


@pytest.mark.long
@pytest.mark.parametrize("seed", [11, 12])
def test_what_eight_engines_store_is_of_use_for_minutes_c36(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "store"
    play(root, seed=seed, num_turns=1_000_000, num_kills=0, until_s=120.0)
    share = check(root)
    print(f"usable share {share:.4f}")
    assert share >= 0.95
