"""Stores that are killed, silent, restarted empty, full, slow, cut off, damaged, that turn us away,
while requests run: no wrong token, nothing hangs, nothing leaks, and afterwards they are of use
again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.exactness import scenarios
from e2e.exactness.rig import EngineRig, engine_rig
from e2e.exactness.subjects import PAGE, TINY_LLAMA
from e2e.stores.places import MATRIX, PLACES, Place
from quire.config import PrefetchPolicy
from quire.types import Tier

OPTIONS: dict[str, Any] = {
    "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
    "prefetch_threshold": PAGE,
}
PROMPTS = TINY_LLAMA.ask()
QUICK = ("redis", "restarted empty")
PATIENCE_S = 240.0


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    yield from opened(request.param, tmp_path, monkeypatch)


def opened(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    if kind == "s3":
        for package in ("moto", "flask_cors", "obstore"):
            pytest.importorskip(package, reason=f"no {package} here: pip install 'quire[dev]'")
    made = PLACES[kind](folder)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        pytest.param(*case, marks=() if case == QUICK else pytest.mark.long, id="-".join(case))
        for case in MATRIX
    ],
    indirect=["place"],
)
def test_a_store_in_trouble_costs_hits_and_nothing_else_c18(place: Place, fault: str) -> None:
    harm, undo, is_silence = place.faults[fault]
    with engine_rig(TINY_LLAMA, store=place.url, **OPTIONS) as rig:
        ask(rig, "before")
        assert from_the_store(rig)
        meanwhile(harm, lambda: ask(rig, f"while it is {fault}"))
        for turn in range(2):
            rig.flush(Tier.DEVICE, Tier.HOST)
            ask(rig, f"while it is {fault}, turn {turn}")
        if is_silence:
            asked_until_it_opens(rig)
        if fault == "damaged":
            assert any(name.startswith("mismatch:") for name in counters(rig)), counters(rig)
        undo()
        used_again(rig)
        rig.settle()


def used_again(rig: EngineRig) -> None:
    """After some seconds: the breaker asks again, a call that was stuck comes back, and a disk that
    was full is tried again."""
    ends_s = time.monotonic() + PATIENCE_S
    while not (from_the_store(rig) and all_answer(rig)):
        assert time.monotonic() < ends_s, f"the store was not used again: {counters(rig)}"


def all_answer(rig: EngineRig) -> bool:
    return all(health.answers for health in rig.engine.status().store.stores)


def asked_until_it_opens(rig: EngineRig) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not counters(rig)["breaker_opened"]:
        assert time.monotonic() < ends_s, f"the breaker did not open: {counters(rig)}"
        rig.flush(Tier.DEVICE, Tier.HOST)
        ask(rig, "until the breaker opens")


def counters(rig: EngineRig) -> dict[str, int]:
    return dict(rig.engine.status().store.counters)


def ask(rig: EngineRig, what: str) -> None:
    scenarios.ask(TINY_LLAMA, rig, PROMPTS, what)


def from_the_store(rig: EngineRig) -> bool:
    """Computed, written, forgotten here: does it come back?"""
    ask(rig, "written")
    rig.flush(Tier.DEVICE, Tier.HOST)
    ask(rig, "found")
    return rig.reused("store") > 0


def meanwhile(harm: Callable[[], None], work: Callable[[], None]) -> None:
    """`harm` falls somewhere into `work`."""
    timer = threading.Timer(0.02, harm)
    timer.start()
    try:
        work()
    finally:
        timer.join()
