"""Servers of stores that are killed, silent, restarted empty, full, slow, cut off, while requests
run: no wrong token, nothing hangs, nothing leaks, and afterwards the store is of use again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.exactness import scenarios
from e2e.exactness.rig import EngineRig, engine_rig
from e2e.exactness.subjects import PAGE, TINY_LLAMA
from quire.config import PrefetchPolicy
from quire.types import Tier
from store_servers import Link, Mooncake, Moto, Valkey

OPTIONS: dict[str, Any] = {
    "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
    "prefetch_threshold": PAGE,
}
PROMPTS = TINY_LLAMA.ask()


class Place:
    """A server that can be harmed, and how the engine reaches it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.server: Any = {"redis": Valkey, "s3": Moto, "mooncake": Mooncake}[kind](folder)
        self.link = None if kind == "mooncake" else Link(self.server.port)

    @property
    def url(self) -> str:
        if self.link is None:
            return str(self.server.url)
        return str(self.server.url).replace(str(self.server.port), str(self.link.port))

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.server.stop()

    # ---- harm, and how it is undone --------------------------------------------------------------

    def kill(self) -> None:
        self.server.kill_master() if self.kind == "mooncake" else self.server.stop()

    def start(self) -> None:
        self.server.start()

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        self.server.pause()

    def go_on(self) -> None:
        self.server.go_on()

    def fill(self) -> None:
        self.server.say(b"CONFIG", b"SET", b"maxmemory", b"1mb")

    def widen(self) -> None:
        self.server.say(b"CONFIG", b"SET", b"maxmemory", b"0")

    def slow(self) -> None:
        assert self.link is not None
        self.link.delay_s = 0.3

    def cut(self) -> None:
        assert self.link is not None
        self.link.cut()

    def mend(self) -> None:
        assert self.link is not None
        self.link.mend()

    def kill_holder(self) -> None:
        self.server.kill_holder(0)

    def add_holder(self) -> None:
        self.server.holders.append(self.server.start_holder())

    def nothing(self) -> None: ...


FAULTS = {
    "killed": ("kill", "start"),
    "paused": ("pause", "go_on"),
    "restarted empty": ("restart", "nothing"),
    "full": ("fill", "widen"),
    "slow": ("slow", "mend"),
    "cut": ("cut", "mend"),
    "holder killed": ("kill_holder", "add_holder"),
}
MATRIX = [
    *(("redis", fault) for fault in list(FAULTS)[:6]),
    *(("s3", fault) for fault in ("killed", "paused", "restarted empty", "slow", "cut")),
    *(("mooncake", fault) for fault in ("killed", "paused", "restarted empty", "holder killed")),
]
QUICK = ("redis", "restarted empty")


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    if request.param == "s3":
        for package in ("moto", "flask_cors", "obstore"):
            pytest.importorskip(package, reason="needs the packages of the dev extra")
    made = Place(request.param, tmp_path)
    yield made
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
    harm, undo = (getattr(place, name) for name in FAULTS[fault])
    with engine_rig(TINY_LLAMA, store=place.url, **OPTIONS) as rig:
        ask(rig, "before")
        assert from_the_store(rig)
        meanwhile(harm, lambda: ask(rig, f"while it is {fault}"))
        for turn in range(2):
            rig.flush(Tier.DEVICE, Tier.HOST)
            ask(rig, f"while it is {fault}, turn {turn}")
        undo()
        for _ in range(60):  # the breaker asks again after some seconds
            if from_the_store(rig):
                break
        else:
            pytest.fail(f"the store was not used again: {rig.engine.status().store.counters}")
        rig.settle()


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
