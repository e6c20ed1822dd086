"""Attach, detach and clear a real store while requests run: none fails, all bytes are right."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.harness import Engine, doc
from quire.errors import StoreError
from quire.manager import StoreState
from quire.store import open_store
from quire.types import Tier


def change_store(engine: Engine, turn: int, urls: list[str]) -> bool:
    """Ask for the next change; False if the last one is still under way."""
    manager = engine.manager
    if manager.store.state is StoreState.CHANGING:
        return False
    kind = turn % 4
    if kind in (0, 2):
        manager.store.attach(urls[turn // 2 % len(urls)])
    elif kind == 1 and manager.store.state is StoreState.ATTACHED:
        manager.store.clear()
    else:
        manager.store.detach()
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_changing_the_store_under_load_fails_no_request_c18(ranks, tmp_path):
    urls = [f"file://{tmp_path}/a", f"file://{tmp_path}/b", "memory://"]
    common = doc(3, seed=100)
    prompts = [doc(3 + i % 4, seed=i, shared=common) for i in range(6)]
    turns = itertools.count()
    finished = 0
    with Engine(ranks=ranks, device=64) as engine:
        running = []
        for number in range(60):
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


def test_a_cleared_store_is_filled_again_c18(tmp_path):
    url, key = f"file://{tmp_path}/store", doc(6, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
        change = engine.manager.store.clear()
        with pytest.raises(StoreError, match="being changed already"):
            engine.manager.store.detach()
        engine.until(lambda: change.done)
        assert change.error == ""
        assert engine.serve(key) == (6, 0, 0, 0)  # used again, so written again
        assert engine.manager.counters.written_pages == 12
        engine.flush(Tier.DEVICE, Tier.HOST)
        assert engine.serve(key) == (0, 0, 6, 0)
        engine.assert_all_pages_come_back()


def test_a_detached_store_keeps_its_pages_for_the_next_attachment_c18(tmp_path):
    url, key = f"file://{tmp_path}/store", doc(6, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
        change = engine.manager.store.detach()
        engine.until(lambda: change.done)
        engine.flush(Tier.DEVICE, Tier.HOST)
        assert engine.serve(key) == (0, 0, 0, 6)
        engine.flush(Tier.DEVICE, Tier.HOST)
        change = engine.manager.store.attach(url)
        engine.until(lambda: change.done)
        assert engine.serve(key) == (0, 0, 6, 0)
        engine.assert_all_pages_come_back()


def test_a_failed_attachment_says_why_and_the_cache_goes_on_c18(tmp_path):
    with Engine(f"file://{tmp_path}/store") as engine:
        engine.serve(doc(6, seed=1))
        change = engine.manager.store.attach(f"file://{tmp_path}/no/such/directory")
        engine.until(lambda: change.done)
        assert "does not exist: create it or correct the path" in change.error
        engine.until(lambda: engine.manager.store.state is StoreState.DETACHED)
        assert engine.serve(doc(6, seed=1)) == (6, 0, 0, 0)
        engine.assert_all_pages_come_back()


def test_ranks_may_open_a_new_directory_at_the_same_moment(tmp_path):
    """Each rank opens the store on a thread of its own; none may see another's half-made marker."""

    def open_and_close(url: str) -> None:
        open_store(url).close()

    with ThreadPoolExecutor(8) as threads:
        for number in range(20):
            urls = [f"file://{tmp_path}/{number}"] * 8
            list(threads.map(open_and_close, urls))
