"""A prompt is computed from the front while the store's pages come from its back (C52).

Whoever asks sees no difference but the time: the same tokens, whatever comes, late, half or never.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_support import MIXES, PAGE, TinyEngine, oracle
from quire.engine.batch import Batch
from quire.manager import Way
from quire.messages import Cancel, Fetch, Load, Transferred
from quire.types import PageStatus, Tier, page_array

PAGES = 40
PROMPT = [(i * i * 3 + i) % 50 for i in range(PAGES * PAGE + 1)]
both_ways = pytest.mark.parametrize("ahead", [False, True])


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[TinyEngine]:
    options = {"way": Way.BOTH, "chunk_tokens": 2 * PAGE, "device_pages": 96} | options
    with TinyEngine(store=f"file://{folder}?max=64MiB", **options) as tiny:
        yield tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store that has the prompt."""
    with engine(tmp_path) as tiny:
        tiny.answer(PROMPT, 1)
    return tmp_path


def settle(tiny: TinyEngine) -> None:
    """All that was held comes back."""
    tiny.run()
    for tier in Tier:
        tiny.manager.flush(tier)
    for allocator in tiny.manager._core.allocators:
        assert allocator.num_free == allocator.num_pages


class Hands:
    """The workers. Reports of commands of one kind are held back until they are let go; others, and
    those when they are let go, are waited for: then the store is never the slower one."""

    def __init__(self, tiny: TinyEngine, held: type | None = None) -> None:
        self.is_open = held is None
        self.commands: list[Any] = []
        """Fetches and loads, or those of the kind that is held."""
        self.spoil: Callable[[Any], Any] = lambda report: report
        self._held = held
        self._kept: list[Transferred] = []
        self._open: set[int] = set()
        """Operations that are to be heard of before the next poll is over."""
        workers = tiny.model.workers
        self._submit, self._poll = workers.submit, workers.poll
        workers.submit = self.submit  # type: ignore[method-assign]
        workers.poll = self.poll  # type: ignore[method-assign]

    def submit(self, commands: Any) -> None:
        for command in commands:
            if isinstance(command, self._held or (Fetch, Load)):
                self.commands.append(command)
            if isinstance(command, Fetch | Load):
                self._open.add(command.op)
            elif isinstance(command, Cancel):
                self._open.discard(command.op)
        self._submit(commands)

    def poll(self) -> list[Any]:
        reports = self._poll()
        while self._open - self._final(reports):
            time.sleep(0.0005)
            reports += self._poll()
        self._open.clear()
        doomed = {command.op for command in self.commands} if self._held is not None else set()
        late = [r for r in reports if isinstance(r, Transferred) and r.op in doomed]
        passed = [r for r in reports if r not in late]
        self._kept += late
        if self.is_open:
            passed, self._kept = passed + self._kept, []
        return [self.spoil(r) if isinstance(r, Transferred) else r for r in passed]

    def _final(self, reports: list[Any]) -> set[int]:
        return {r.op for r in reports if isinstance(r, Transferred) and r.final}


@both_ways
def test_the_answer_is_the_models_and_both_had_a_part_in_it_c52(folder: Path, ahead: bool) -> None:
    with engine(folder, ahead=ahead) as tiny:
        Hands(tiny)
        request = tiny.ask(PROMPT, 5)
        tiny.run()
        counters = tiny.manager.counters
        assert tiny.tokens(request) == oracle(PROMPT, 5)
        assert counters.meetings == 1
        assert PAGES // 3 < counters.met_pages < PAGES, "one of them did nothing"
        cached = tiny.cached(request)
        assert cached.store == counters.met_pages * PAGE
        assert cached.store + cached.store_left == PAGES * PAGE
        assert tiny.model.num_computed == len(PROMPT) - cached.store + 4
        settle(tiny)


@both_ways
def test_what_has_come_and_what_was_computed_is_found_by_the_next_c52(
    folder: Path, ahead: bool
) -> None:
    with engine(folder, ahead=ahead) as tiny:
        tiny.answer(PROMPT, 1)
        again = tiny.ask(PROMPT, 5)
        tiny.run()
        assert tiny.tokens(again) == oracle(PROMPT, 5)
        assert tiny.cached(again).device == PAGES * PAGE


@both_ways
@pytest.mark.parametrize("kind", [Fetch, Load])
@pytest.mark.parametrize("steps", [1, 6, 12, 18, 24])
def test_an_abort_at_any_time_gives_everything_back_c52(
    folder: Path, ahead: bool, kind: type, steps: int
) -> None:
    with engine(folder, ahead=ahead) as tiny:
        hands = Hands(tiny, kind)
        request = tiny.ask(PROMPT, 5)
        while not tiny.manager.counters.meetings:
            tiny.step()
        tiny.step(steps)
        tiny.scheduler.abort(request)
        hands.is_open = True
        settle(tiny)
        assert tiny.answer(PROMPT, 3) == oracle(PROMPT, 3)


@both_ways
def test_a_store_that_stalls_is_not_waited_for_c52(folder: Path, ahead: bool) -> None:
    with engine(folder, ahead=ahead) as tiny:
        hands = Hands(tiny, Fetch)
        request = tiny.ask(PROMPT, 5)
        while not tiny.of(request) or tiny.last(request).finish is None:
            tiny.step()
        assert hands.commands, "nothing was asked for"
        assert tiny.tokens(request) == oracle(PROMPT, 5)
        assert tiny.cached(request).store == 0
        assert tiny.manager.counters.overtaken_pages > 0
        hands.is_open = True
        settle(tiny)


def test_nothing_is_late_while_what_comes_before_it_is_being_computed_c52(folder: Path) -> None:
    """A batch is chosen as soon as the one before it is launched: by then nothing can have come."""
    with engine(folder, ahead=True) as tiny:
        hands = Hands(tiny, Fetch)
        request = tiny.ask(PROMPT, 5)
        drop, flying = tiny.manager.meetings._drop_front, []

        def watch(meeting: Any, count: int) -> None:
            asked = tiny.scheduler.request(request)
            flying.append(asked.flying if asked is not None else 0)
            drop(meeting, count)

        tiny.manager.meetings._drop_front = watch  # type: ignore[method-assign]
        while not tiny.of(request) or tiny.last(request).finish is None:
            tiny.step()
        assert flying
        assert not any(flying)
        hands.is_open = True
        settle(tiny)


@both_ways
def test_no_page_is_computed_into_while_it_is_copied_into_c52(folder: Path, ahead: bool) -> None:
    """Copies that do not end: the request computes up to them, and no further."""
    with engine(folder, ahead=ahead) as tiny:
        hands = Hands(tiny, Load)
        launch, batches = tiny.model.launch, []

        def watch(batch: Batch) -> None:
            batches.append(batch)
            launch(batch)

        tiny.model.launch = watch  # type: ignore[method-assign]
        request = tiny.ask(PROMPT, 5)
        for _ in range(400):
            tiny.step()
        assert not tiny.of(request)
        copied = {page for load in hands.commands for page in page_array(load.device).tolist()}
        assert copied, "nothing came"
        for batch in batches:
            for segment in batch.segments:
                assert not copied & set(page_array(segment.pages).tolist())
        hands.is_open = True
        tiny.run()
        assert tiny.tokens(request) == oracle(PROMPT, 5)
        settle(tiny)


def half(report: Any) -> Any:
    good = len(report.statuses) // 2
    lost = bytes([PageStatus.CORRUPT]) * (len(report.statuses) - good)
    return msgspec.structs.replace(report, statuses=report.statuses[:good] + lost)


def none(report: Any) -> Any:
    return msgspec.structs.replace(
        report, statuses=bytes([PageStatus.CORRUPT]) * len(report.statuses)
    )


def end(report: Any) -> Any:
    lost = len(report.statuses) // 2
    good = report.statuses[lost:]
    return msgspec.structs.replace(report, statuses=bytes([PageStatus.CORRUPT]) * lost + good)


@both_ways
@pytest.mark.parametrize("spoil", [half, none, end])
@pytest.mark.parametrize("kind", [Fetch, Load])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_does_not_come_is_computed_c52(
    folder: Path, ahead: bool, spoil: Any, kind: type, number: int
) -> None:
    with engine(folder, ahead=ahead) as tiny:
        hands = Hands(tiny, kind)
        hands.is_open = True

        def nth(report: Any) -> Any:
            spoiled = len(hands.commands) > number and report.op == hands.commands[number].op
            return spoil(report) if spoiled else report

        hands.spoil = nth
        request = tiny.ask(PROMPT, 5)
        tiny.run()
        assert tiny.manager.counters.meetings >= 1
        assert tiny.tokens(request) == oracle(PROMPT, 5)
        settle(tiny)
        assert tiny.answer(PROMPT, 3) == oracle(PROMPT, 3)


@both_ways
def test_many_at_once_under_pressure_c52(folder: Path, ahead: bool) -> None:
    """Preempted, held back for one another, on a device and a host that hold one and a half."""
    prompts = [PROMPT, PROMPT[: 30 * PAGE] + [3] * 21, [7] * 9, PROMPT[: 20 * PAGE + 2], PROMPT]
    with engine(folder, ahead=ahead, device_pages=64, host_pages=24, max_running=4) as tiny:
        requests = [tiny.ask(prompt, 20) for prompt in prompts]
        tiny.run()
        for prompt, request in zip(prompts, requests, strict=True):
            assert tiny.tokens(request) == oracle(prompt, 20)
        settle(tiny)


@pytest.mark.parametrize("mix", MIXES[1:])
def test_state_that_is_not_of_full_pages_alone_is_not_met_c52(tmp_path: Path, mix: str) -> None:
    with engine(tmp_path, mix=mix) as tiny:
        tiny.answer(PROMPT, 1)
    with engine(tmp_path, mix=mix) as tiny:
        assert tiny.answer(PROMPT, 5) == oracle(PROMPT, 5, mix=mix)
        assert tiny.manager.counters.meetings == 0
