"""Load with faults drawn at random, one after the other: no wrong token, and it ends well.

QUIRE_SOAK_S=300 QUIRE_SOAK_SEED=7 pytest -m long tests/e2e/stores/test_soak.py
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import TINY_LLAMA
from e2e.stores.test_faults import FAULTS, MATRIX, OPTIONS, Place, ask, from_the_store, meanwhile
from quire.types import Tier

SECONDS = float(os.environ.get("QUIRE_SOAK_S", "45"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["redis", "s3", "mooncake"])
def test_random_faults_under_load_cost_hits_and_nothing_else_c18(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "s3":
        for package in ("moto", "flask_cors", "obstore"):
            pytest.importorskip(package, reason="needs the packages of the dev extra")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    seed = int(os.environ.get("QUIRE_SOAK_SEED", random.SystemRandom().randrange(1 << 16)))
    print(f"QUIRE_SOAK_SEED={seed}")
    chance, faults = random.Random(seed), [fault for place, fault in MATRIX if place == kind]
    place = Place(kind, tmp_path)
    try:
        with engine_rig(TINY_LLAMA, store=place.url, **OPTIONS) as rig:
            ends_s, met = time.monotonic() + SECONDS, []
            while time.monotonic() < ends_s or not met:
                met.append(chance.choice(faults))
                harm, undo = (getattr(place, name) for name in FAULTS[met[-1]])
                meanwhile(harm, lambda: ask(rig, met[-1]))
                if chance.random() < 0.5:
                    rig.flush(Tier.DEVICE, *[Tier.HOST] * chance.randrange(2))
                    ask(rig, f"still {met[-1]}")
                undo()
                ask(rig, f"after {met[-1]}")
            print(f"{kind}: {len(met)} faults: {', '.join(met)}")
            assert any(from_the_store(rig) for _ in range(60)), rig.engine.status().store.counters
            rig.settle()
    finally:
        place.close()
