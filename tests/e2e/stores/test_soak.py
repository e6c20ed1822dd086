"""Load with faults drawn at random, one after the other: no wrong token, and it ends well.

QUIRE_SOAK_S=300 QUIRE_SOAK_SEED=7 pytest -m long --capture=no tests/e2e/stores/test_soak.py
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import TINY_LLAMA
from e2e.stores.test_faults import OPTIONS, ask, counters, meanwhile, opened, used_again
from quire.types import Tier

SECONDS = float(os.environ.get("QUIRE_SOAK_S", "45"))
HANGS_S = 60.0
"""Nothing that is asked takes so long, on any machine that runs the rest of these tests: a request
waits ten seconds for what it fetches, and then computes. With that, 17 seconds were seen."""
MORE = 48
"""Threads and open files that may be there at the end beside those after the first request: lanes
and connections are kept, as many as were needed at once."""
LANES = 4
"""Connections to a holder that has died, which Mooncake's client may keep until it leaves."""
DEATHS = ("holder killed", "one of two replicas lost")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["file", "redis", "s3", "mooncake", "mooncake twice"])
def test_random_faults_under_load_cost_hits_and_nothing_else_c18(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = int(os.environ.get("QUIRE_SOAK_SEED", random.SystemRandom().randrange(1 << 16)))
    print(f"QUIRE_SOAK_SEED={seed}")
    chance, met, asked_s = random.Random(seed), Counter[str](), []
    with (
        contextmanager(opened)(kind, tmp_path, monkeypatch) as place,
        engine_rig(TINY_LLAMA, store=place.url, **OPTIONS) as rig,
    ):

        def timed(what: str) -> None:
            began_s = time.monotonic()
            ask(rig, what)
            asked_s.append(time.monotonic() - began_s)

        timed("before")
        rig.settle()
        before, ends_s = held(), time.monotonic() + SECONDS
        while time.monotonic() < ends_s or not met:
            fault = chance.choice(list(place.faults))
            met[fault] += 1
            harm, undo, _ = place.faults[fault]
            meanwhile(harm, partial(timed, fault))
            if chance.random() < 0.5:
                rig.flush(Tier.DEVICE, *[Tier.HOST] * chance.randrange(2))
                timed(f"still {fault}")
            undo()
            timed(f"after {fault}")
            print(f"after {fault}, threads and files: {held()}")
        used_again(rig)
        rig.settle()
        print(f"{kind}: {met.total()} faults: {dict(met)}")
        print(f"{len(asked_s)} times asked, the longest took {max(asked_s):.1f} s")
        print(f"threads, files before and after: {before}, {held()}; {counters(rig)}")
        assert max(asked_s) < HANGS_S, "somebody waited for what has no deadline"
        more = MORE + LANES * sum(met[fault] for fault in DEATHS)
        assert all(now <= was + more for was, now in zip(before, held(), strict=True))


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
