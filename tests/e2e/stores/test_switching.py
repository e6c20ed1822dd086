"""From any store to any other while requests run: none fails, all bytes are right."""

from __future__ import annotations

import itertools

import pytest

from e2e.harness import Engine, doc
from e2e.test_store_changes import change_store
from quire.types import Tier


@pytest.mark.long
def test_switching_between_stores_under_load_fails_no_request_c18(store_url, tmp_path) -> None:
    names = ["redis", "s3", "mooncake", "redis before file"]
    urls = [store_url(name) for name in names] + ["memory:// memory://?write=back"]
    common = doc(3, seed=100)
    prompts = [doc(3 + i % 4, seed=i, shared=common) for i in range(6)]
    turns = itertools.count()
    with Engine(device=64) as engine:
        running: list = []
        finished = 0
        for number in range(150):
            if len(running) < 4:
                running.append(engine.start(prompts[number % len(prompts)]))
            change_store(engine, next(turns), urls)
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

        def drained() -> bool:
            for request in running:
                if not request.done:
                    request.advance()
            return all(request.done for request in running)

        engine.until(drained)
        assert finished + len(running) >= 10
        engine.assert_all_pages_come_back()
