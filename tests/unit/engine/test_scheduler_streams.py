"""A hit that the host cannot hold at once is used whole (C51)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_support import MIXES, PAGE, TinyEngine, oracle
from quire.config import PrefetchPolicy
from quire.engine.batch import Batch
from quire.engine.messages import CachedTokens
from quire.manager import LoadState, PrefetchState
from quire.messages import Fetch, Load, Transferred
from quire.types import PageStatus, Tier, num_pages

PAGES = 32
HOST_PAGES = 8
PROMPT = [(i * i * 3 + i) % 50 for i in range(PAGES * PAGE + 1)]
every_mix = pytest.mark.parametrize("mix", MIXES)


@contextmanager
def engine(folder: Path, mix: str, **options: Any) -> Iterator[TinyEngine]:
    with TinyEngine(store=f"file://{folder}?max=64MiB", mix=mix, **options) as tiny:
        yield tiny


def stored(folder: Path, mix: str) -> None:
    """The store has the prompt, with its state at the end and nowhere else."""
    with engine(folder, mix) as tiny:
        tiny.answer(PROMPT, 1)


def settle(tiny: TinyEngine) -> None:
    tiny.run()
    for tier in Tier:
        tiny.manager.flush(tier)
    for component in tiny.manager.components:
        for tier in Tier:
            allocator = tiny.manager._core.allocators[component.index * 2 + tier]
            assert allocator.num_free == allocator.num_pages


def queue_until_fetched(tiny: TinyEngine) -> None:
    """The request queues for as long as its prefetch takes: no policy has to wait."""
    (request,) = tiny.scheduler.waiting
    assert request.lease is not None
    assert request.lease.prefetch is not None
    workers = tiny.model.workers
    while request.lease.prefetch.state is not PrefetchState.DONE:
        workers.submit(tiny.manager.step(workers.poll()))


@every_mix
@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_a_hit_four_times_the_host_is_used_whole_c51(
    tmp_path: Path, mix: str, policy: PrefetchPolicy
) -> None:
    """Whatever the policy says about waiting in the queue: what is cut there comes later."""
    stored(tmp_path, mix)
    with engine(tmp_path, mix, host_pages=HOST_PAGES, prefetch=policy) as tiny:
        request = tiny.ask(PROMPT, 5)
        queue_until_fetched(tiny)
        tiny.run()
        assert tiny.tokens(request) == oracle(PROMPT, 5, mix=mix)
        assert tiny.cached(request) == CachedTokens(store=PAGES * PAGE)
        assert tiny.model.num_computed == 1 + 4
        settle(tiny)


@every_mix
def test_others_run_while_a_hit_comes_in_parts_and_are_not_disturbed_c51(
    tmp_path: Path, mix: str
) -> None:
    stored(tmp_path, mix)
    with engine(tmp_path, mix, host_pages=HOST_PAGES) as tiny:
        requests = [tiny.ask(PROMPT, 5), tiny.ask([7] * 9, 30), tiny.ask(PROMPT, 3)]
        tiny.run()
        assert tiny.tokens(requests[0]) == oracle(PROMPT, 5, mix=mix)
        assert tiny.tokens(requests[1]) == oracle([7] * 9, 30, mix=mix)
        assert tiny.tokens(requests[2]) == oracle(PROMPT, 3, mix=mix)
        settle(tiny)


@every_mix
@pytest.mark.parametrize("victim", [Fetch, Load])
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_part_that_fails_ends_it_and_the_answer_is_right_c51(
    tmp_path: Path, mix: str, victim: type, number: int
) -> None:
    """The n-th fetch or load after the first part was loaded ends badly, half-way."""
    stored(tmp_path, mix)
    with engine(tmp_path, mix, host_pages=HOST_PAGES) as tiny:
        workers, seen = tiny.model.workers, []
        submit, poll = workers.submit, workers.poll
        doomed = set()

        def watch(commands: Any) -> None:
            for command in commands:
                if isinstance(command, victim) and tiny.manager.counters.streams:
                    if len(seen) == number:
                        doomed.add(command.op)
                    seen.append(command)
            submit(commands)

        def spoil(reports: list[Any]) -> list[Any]:
            return [
                Transferred(
                    r.op,
                    r.rank,
                    r.component,
                    r.first,
                    bytes(len(r.statuses) // 2).ljust(len(r.statuses), bytes([PageStatus.CORRUPT])),
                    r.final,
                )
                if isinstance(r, Transferred) and r.op in doomed
                else r
                for r in reports
            ]

        workers.submit = watch  # type: ignore[method-assign]
        workers.poll = lambda: spoil(poll())  # type: ignore[method-assign]
        request = tiny.ask(PROMPT, 5)
        tiny.run()
        assert tiny.manager.counters.streams >= 1  # again, if what lies in front did not come
        assert tiny.tokens(request) == oracle(PROMPT, 5, mix=mix)
        cached = tiny.cached(request)
        assert cached.store + cached.store_left == PAGES * PAGE
        settle(tiny)


def test_nothing_is_computed_on_pages_that_did_not_arrive(tmp_path: Path) -> None:
    """The load in front fails while the rest of the hit is still on its way in parts."""
    stored(tmp_path, MIXES[0])
    with engine(tmp_path, MIXES[0], host_pages=HOST_PAGES) as tiny:
        workers, schedule, doomed = tiny.model.workers, tiny.scheduler.schedule, set()
        submit, poll = workers.submit, workers.poll

        def watch(commands: Any) -> None:
            if tiny.manager.counters.streams and not doomed:
                doomed.update(command.op for command in commands if isinstance(command, Load))
            submit(commands)

        def spoil(report: Any) -> Any:
            if not isinstance(report, Transferred) or report.op not in doomed:
                return report
            lost = bytes([PageStatus.CORRUPT]) * len(report.statuses)
            return msgspec.structs.replace(report, statuses=lost)

        def look() -> Batch | None:
            batch = schedule()
            for segment in batch.segments if batch is not None else ():
                request = tiny.scheduler.request(segment.id)
                assert request is not None
                assert request.lease is not None
                assert request.lease.load_state is not LoadState.FAILED
            return batch

        workers.submit = watch  # type: ignore[method-assign]
        workers.poll = lambda: [spoil(report) for report in poll()]  # type: ignore[method-assign]
        tiny.scheduler.schedule = look  # type: ignore[method-assign]
        request = tiny.ask(PROMPT, 5)
        tiny.run()
        assert tiny.scheduler.counters.restarted == 1
        assert tiny.tokens(request) == oracle(PROMPT, 5)


@every_mix
@pytest.mark.parametrize("steps", range(0, 24, 3))
def test_an_abort_at_any_time_gives_everything_back_c51(
    tmp_path: Path, mix: str, steps: int
) -> None:
    stored(tmp_path, mix)
    with engine(tmp_path, mix, host_pages=HOST_PAGES) as tiny:
        request = tiny.ask(PROMPT, 5)
        while not tiny.of(request) and not tiny.manager.counters.streams:
            tiny.step()
        tiny.step(steps)
        tiny.scheduler.abort(request)
        settle(tiny)
        assert tiny.answer(PROMPT, 3) == oracle(PROMPT, 3, mix=mix)


def test_parts_are_no_larger_than_the_host_has_room_for_c51(tmp_path: Path) -> None:
    stored(tmp_path, "full")
    with engine(tmp_path, "full", host_pages=HOST_PAGES) as tiny:
        submit, sizes = tiny.model.workers.submit, []

        def watch(commands: Any) -> None:
            sizes.extend(num_pages(c.host) for c in commands if isinstance(c, Fetch))
            submit(commands)

        tiny.model.workers.submit = watch  # type: ignore[method-assign]
        tiny.answer(PROMPT, 1)
        assert max(sizes) <= HOST_PAGES // 2
        assert sum(sizes) == PAGES
        assert tiny.manager.counters.streamed_pages > PAGES // 2
