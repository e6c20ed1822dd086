"""From any store to any other while requests run: none fails, all bytes are right."""

from __future__ import annotations

import itertools

import pytest

from e2e.harness import Engine, doc
from e2e.test_store_changes import change_store
from quire.types import Tier

FIVE = ["file", "memory", "redis", "s3", "mooncake"]
PAIRS = [*itertools.combinations(FIVE, 2), ("redis before file", "mooncake before s3")]
QUICK = [("file", "redis"), ("memory", "redis")]
NUM_TURNS = 60


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(pair, marks=() if pair in QUICK else pytest.mark.long, id=" and ".join(pair))
        for pair in PAIRS
    ],
)
def test_switching_between_stores_under_load_fails_no_request_c18(names, store_url) -> None:
    """Attached, cleared, changed for the other, detached, in turn; a request that failed, or a byte
    that is not what was computed, ends the test."""
    urls = [store_url(name) for name in names]
    common = doc(3, seed=100)
    prompts = [doc(3 + i % 4, seed=i, shared=common) for i in range(6)]
    with Engine(device=64) as engine:
        running: list = []
        finished = turn = 0
        for number in range(NUM_TURNS):
            if len(running) < 4:
                running.append(engine.start(prompts[number % len(prompts)]))
            turn += change_store(engine, turn, urls)
            for request in running:
                request.advance()
            engine.step()
            finished += sum(request.done for request in running)
            running = [request for request in running if not request.done]
            if number % 7 == 0:
                engine.flush(Tier.DEVICE)
            if number % 11 == 0:
                engine.flush(Tier.HOST)
            engine.manager.check_invariants()

        def changed_and_drained() -> bool:
            nonlocal turn
            turn += turn < 4 and change_store(engine, turn, urls)
            for request in running:
                if not request.done:
                    request.advance()
            return turn >= 4 and all(request.done for request in running)

        engine.until(changed_and_drained)  # each was attached, however slow that is
        assert finished + len(running) >= 10
        engine.assert_all_pages_come_back()
