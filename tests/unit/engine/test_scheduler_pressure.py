"""The engine when memory is short and the store is slow: what waits keeps what it fetches, and what
was found is reported where it was (C37, C38, C42)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from engine_support import MIXES, PAGE, TinyEngine, oracle
from quire.engine.messages import CachedTokens
from quire.keys import Namespace
from quire.manager import Decline
from quire.messages import Command, Fetch, Probe
from quire.types import RequestId, Tier

STORE = "memory://?max=16MiB"
every_mix = pytest.mark.parametrize("mix", MIXES)


class Gate:
    """A store that answers when it is told to."""

    def __init__(self, tiny: TinyEngine) -> None:
        self._workers = tiny.model.workers
        self._submit = self._workers.submit
        self._held: list[Command] = []
        self.sent: list[Command] = []
        self.is_open = False
        self._workers.submit = self.submit  # type: ignore[method-assign]

    def submit(self, commands: Iterable[Command]) -> None:
        commands = list(commands)
        self.sent += commands
        slow = [c for c in commands if isinstance(c, Fetch) and not self.is_open]
        self._held += slow
        self._submit([c for c in commands if c not in slow])

    def open(self) -> None:
        self.is_open = True
        held, self._held = self._held, []
        self._submit(held)


def tokens(seed: int, pages: int) -> list[int]:
    return [(seed * 7 + i * i * (seed + 1)) % 50 for i in range(pages * PAGE)]


def forget(tiny: TinyEngine) -> None:
    """As after a restart: only the store has anything."""
    tiny.run()
    tiny.manager.flush(Tier.DEVICE)
    tiny.manager.flush(Tier.HOST)


def finish(tiny: TinyEngine, request: RequestId) -> None:
    while not tiny.of(request) or tiny.last(request).finish is None:
        tiny.step()


def test_nobody_loses_a_prefetch_because_somebody_else_needs_device_pages_c38() -> None:
    """Twelve wait for a slow store, on a prefix that the device has; the one that runs grows."""
    prefix = tokens(1, 5)
    prompts = [prefix + tokens(2 + i, 5) + [i] for i in range(12)]
    with TinyEngine(device_pages=24, host_pages=256, max_running=1, store=STORE) as tiny:
        for prompt in prompts:
            tiny.answer(prompt, 1)
        forget(tiny)
        tiny.answer([*prefix, 1], 1)
        before = tiny.manager.counters.fetched_pages
        gate = Gate(tiny)
        running = tiny.ask(tokens(40, 4), 70)
        tiny.step()
        waiting = [tiny.ask(prompt, 2) for prompt in prompts]
        finish(tiny, running)
        gate.open()
        tiny.run()
        assert tiny.tokens(running) == oracle(tokens(40, 4), 70)
        for prompt, request in zip(prompts, waiting, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 2)
        assert tiny.scheduler.counters.yielded > 0, "there was no pressure"
        assert tiny.manager.counters.declined[Decline.ABORTED] == 0
        assert tiny.manager.counters.fetched_pages - before == 12 * 5
        probes = [probe for probe in gate.sent if isinstance(probe, Probe)]
        assert sum(len(probe.queries) for probe in probes) <= 13 * 3


@every_mix
def test_requests_that_yield_their_device_pages_answer_as_ever_c32(mix: str) -> None:
    """Short of device pages, host pages and store together."""
    prefix = tokens(1, 4)
    prompts = [prefix + tokens(2 + i, 4) + [i] for i in range(6)]
    options = {"device_pages": 26, "host_pages": 24, "max_running": 3, "store": STORE, "mix": mix}
    with TinyEngine(**options) as tiny:  # type: ignore[arg-type]
        for _ in range(3):
            requests = [tiny.ask(prompt, 12) for prompt in prompts]
            tiny.run()
            for prompt, request in zip(prompts, requests, strict=True):
                assert tiny.tokens(request) == oracle(prompt, 12, mix=mix)
            tiny.manager.flush(Tier.DEVICE)


def test_a_request_that_has_to_wait_for_room_reports_where_its_prompt_was_c42() -> None:
    """On the device when it arrived; there is no room for it, and by then only the host has it."""
    prompt = [*tokens(1, 6), 1]
    with TinyEngine(device_pages=14, max_running=2) as tiny:
        tiny.answer(prompt, 1)
        running = tiny.ask(tokens(2, 8), 23)
        tiny.step()
        request = tiny.ask(prompt, 2)
        match = tiny.manager.match(tiny.scheduler.waiting[0].key)
        finish(tiny, running)
        tiny.run()
        assert tiny.scheduler.counters.yielded > 0
        assert tiny.manager.counters.loaded_pages > match.num_host
        assert tiny.cached(request) == CachedTokens(match.num_device * PAGE, match.num_host * PAGE)


def restarted(together: bool) -> list[CachedTokens]:
    """What six requests with a common beginning are told, when only the store has their prompts."""
    prefix = tokens(1, 4)
    prompts = [prefix + tokens(2 + i, 2) + [i] for i in range(6)]
    with TinyEngine(device_pages=20, host_pages=64, store=STORE, max_running=4) as tiny:
        for prompt in prompts:
            tiny.answer(prompt, 2)
        forget(tiny)
        requests = []
        for prompt in prompts:
            requests.append(tiny.ask(prompt, 2))
            if not together:
                forget(tiny)
        tiny.run()
        return [tiny.cached(request) for request in requests]


@pytest.mark.parametrize("together", [False, True])
def test_tokens_that_the_store_had_count_as_the_stores_c42(together: bool) -> None:
    assert restarted(together) == [CachedTokens(store=6 * PAGE)] * 6


def test_what_was_found_counts_once_however_often_a_request_looks() -> None:
    prompts = [[*tokens(1 + i, 6), 1] for i in range(3)]
    with TinyEngine(device_pages=20, max_running=3) as tiny:
        for prompt in prompts:
            tiny.answer(prompt, 1)
        tiny.run()
        counters = tiny.manager.counters
        before = counters.matched_device_pages + counters.matched_host_pages
        for prompt in prompts:
            tiny.ask(prompt, 30)
        tiny.run()
        assert tiny.scheduler.counters.preempted > 0
        found = counters.matched_device_pages + counters.matched_host_pages - before
        assert found <= 3 * 6


def test_a_salt_changes_the_namespace_and_nothing_else_of_it() -> None:
    with TinyEngine() as tiny:
        base = tiny.engine.namespace_of("")
        assert base == Namespace("sum", "float32", PAGE)
        assert tiny.engine.namespace_of("a") == replace(base, salt="a")
