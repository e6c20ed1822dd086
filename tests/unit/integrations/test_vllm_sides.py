"""Both sides of the connector with the real manager, worker and stores, around a small vLLM."""

import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mini_vllm import BLOCK, WINDOWS, MiniRequest, MiniVllm, over_tensors
from quire.integrations.vllm.orders import Orders, Setup
from quire.manager.operations import OperationKind
from quire.transfer import Copy
from quire.types import OperationId, PageIds, Tier


@pytest.fixture
def engines() -> Iterator[list[MiniVllm]]:
    made: list[MiniVllm] = []
    yield made
    for one in made:
        one.close()


def request(name: str, seed: int, length: int, **how: object) -> MiniRequest:
    rng = random.Random(seed)
    return MiniRequest(name, [rng.randrange(1000) for _ in range(length)], **how)  # type: ignore[arg-type]


def at_rest(engine: MiniVllm) -> bool:
    """Everything came back."""
    engine.manager.check_invariants()
    num_free = engine.num_blocks - 1
    return not engine.manager.leases and len(engine.free) == len(set(engine.free)) == num_free


GROUPS = pytest.mark.parametrize("how", [{}, WINDOWS], ids=["one group", "windows"])


@GROUPS
@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_a_second_request_loads_what_the_first_computed(
    engines: list[MiniVllm], chunk: int, how: dict[str, object]
) -> None:
    engine = over_tensors(chunk=chunk, **how)
    engines.append(engine)
    engine.add(request("a", seed=1, length=42))
    engine.run()
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert engine.num_loaded == 41 // BLOCK
    assert at_rest(engine)


def test_a_prompt_of_whole_blocks_is_found_whole(engines: list[MiniVllm]) -> None:
    engine = over_tensors()
    engines.append(engine)
    for name in ("a", "b"):
        engine.add(request(name, seed=1, length=10 * BLOCK))
        engine.run()
    assert engine.num_loaded == 10
    assert at_rest(engine)


@GROUPS
def test_another_engine_finds_it_in_the_store(
    engines: list[MiniVllm], tmp_path: Path, how: dict[str, object]
) -> None:
    url = f"file://{tmp_path}?max=64MiB"
    for name in ("a", "b"):
        engine = over_tensors(store=url, **how)
        engines.append(engine)
        engine.add(request(name, seed=1, length=42))
        engine.run()
        assert at_rest(engine)
    assert engines[1].num_loaded == 41 // BLOCK
    first = engines[1].by_name["b"]
    assert engines[1].leader.from_store(first, 100) == 0, "it has ended"


def test_the_first_request_finds_the_store_however_long_nobody_came(
    engines: list[MiniVllm], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}?max=64MiB"
    for name in ("a", "b"):
        engine = over_tensors(store=url)
        engines.append(engine)
        engine.now[0] += 600
        engine.add(request(name, seed=1, length=42))
        engine.run()
    assert engines[1].num_loaded == 41 // BLOCK


def test_tenants_share_nothing(engines: list[MiniVllm]) -> None:
    engine = over_tensors()
    engines.append(engine)
    for name, salt in (("a", None), ("b", "x"), ("c", "y")):
        engine.add(request(name, seed=1, length=42, cache_salt=salt))
        engine.run()
    assert engine.num_loaded == 0
    engine.add(request("d", seed=1, length=42, cache_salt="y"))
    engine.run()
    assert engine.num_loaded == 41 // BLOCK


def test_after_a_reset_nothing_is_found(engines: list[MiniVllm], tmp_path: Path) -> None:
    engine = over_tensors(store=f"file://{tmp_path}?max=64MiB")
    engines.append(engine)
    engine.add(request("a", seed=1, length=42))
    engine.run()
    assert engine.leader.reset()
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert engine.num_loaded == 0
    engine.add(request("c", seed=1, length=42))
    engine.run()
    assert engine.num_loaded == 41 // BLOCK, "what came after it is"


@pytest.mark.parametrize("component", ["full", "window"])
def test_a_load_that_fails_is_computed_and_its_request_is_not_offered_it_again(
    engines: list[MiniVllm], monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    engine = over_tensors(**({} if component == "full" else WINDOWS))
    engines.append(engine)
    engine.add(request("a", seed=1, length=42))
    engine.run()

    def broken(*_: object) -> None:
        raise OSError("cut")

    monkeypatch.setattr(engine.hands.pools[component].engine, "load", broken)
    for name in ("b", "c"):
        engine.add(request(name, seed=1, length=42))
        engine.run()
    assert engine.num_recoveries == 2
    assert at_rest(engine)


def test_a_store_that_is_dead_at_the_start_costs_a_wait_and_is_tried_again(
    engines: list[MiniVllm],
) -> None:
    engine = over_tensors(store="redis://127.0.0.1:1")
    engines.append(engine)
    engine.add(request("a", seed=1, length=42))
    engine.run()
    assert at_rest(engine)
    tries = engine.manager.operations.num_started
    engine.now[0] += 31
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert engine.manager.operations.num_started > tries + 2
    assert engine.num_loaded == 41 // BLOCK


@GROUPS
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_blocks_hold_what_they_should_and_nothing_leaks(
    engines: list[MiniVllm], seed: int, tmp_path: Path, how: dict[str, object]
) -> None:
    rng = random.Random(seed)
    faults = "drop=0.1&corrupt=0.1&raise=0.1"
    url = rng.choice(["", f"file://{tmp_path}?max=64MiB", f"faulty+file://{tmp_path}?{faults}"])
    engine = over_tensors(
        store=url,
        host_pages=rng.choice([12, 64]),
        chunk=rng.choice([3, 8, 64]),
        save_tokens=rng.choice([4, 12]),
        **how,
    )
    engines.append(engine)
    for number in range(25):
        one = request(
            f"r{number}",
            seed=rng.randrange(5),
            length=rng.randint(2, 60),
            max_tokens=rng.randint(1, 30),
            cache_salt=rng.choice([None, None, "x"]),
        )
        engine.add(one)
        for _ in range(rng.randrange(8)):
            engine.step()
            if engine.running and rng.random() < 0.1:
                engine.preempt(rng.choice(engine.running))
            live = engine.running + engine.waiting
            if live and rng.random() < 0.05:
                engine.abort(rng.choice(live))
            if rng.random() < 0.05:
                engine.manager.flush(Tier.HOST)
            if rng.random() < 0.02:
                engine.leader.reset()
    engine.run()
    assert at_rest(engine)
    assert engine.num_loaded > 0


def slow_backups(engine: MiniVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies out of blocks begin a tenth of a second later than they should."""

    def slow(backup: Callable[[PageIds, PageIds], Copy], device: PageIds, host: PageIds) -> Copy:
        copy = Copy(1)

        def late() -> None:
            backup(device, host).wait()
            copy.layers_moved(1)

        threading.Timer(0.1, late).start()
        return copy

    for pools in engine.hands.pools.values():
        monkeypatch.setattr(pools.engine, "backup", partial(slow, pools.engine.backup))


@GROUPS
def test_blocks_are_copied_out_before_somebody_else_gets_them(
    engines: list[MiniVllm], monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    engine = over_tensors(**how)
    engines.append(engine)
    slow_backups(engine, monkeypatch)
    one = request("a", seed=1, length=42, max_tokens=20)
    engine.add(one)
    while one.num_computed_tokens < 42:
        engine.step()
    assert engine.leader.will_free is False
    engine.preempt(one)
    engine.run()
    assert engine.num_loaded > 0, "it found again what it had computed"
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert at_rest(engine)


def test_a_window_that_moves_on_waits_for_what_is_copied_out_of_it(
    engines: list[MiniVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = over_tensors(**WINDOWS)
    engines.append(engine)
    slow_backups(engine, monkeypatch)
    engine.add(request("a", seed=1, length=42, max_tokens=20))
    engine.run()
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert engine.num_loaded == 41 // BLOCK, "and they hold what was computed"
    assert at_rest(engine)


def test_a_window_of_a_request_that_has_to_wait_for_blocks_is_copied_before_others_get_it(
    engines: list[MiniVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lets go of what lies before a window although its request cannot be scheduled."""
    engine = over_tensors(**WINDOWS)
    engines.append(engine)
    slow_backups(engine, monkeypatch)
    one = request("a", seed=1, length=42, max_tokens=20)
    engine.add(one)
    for _ in range(30):
        engine.stalled.add("a")
        engine.step()
        engine.step()
    engine.run()
    engine.add(request("b", seed=1, length=42))
    engine.run()
    assert engine.num_loaded == 41 // BLOCK, "and they hold what was computed"
    assert at_rest(engine)


@pytest.mark.parametrize("length", range(40, 48))
def test_with_windows_a_prompt_of_any_length_is_found_again(
    engines: list[MiniVllm], length: int
) -> None:
    """Wherever in a block it ends: a step later its window may have moved on."""
    engine = over_tensors(**WINDOWS, chunk=64)
    engines.append(engine)
    for name in ("a", "b"):
        engine.add(request(name, seed=1, length=length, max_tokens=1))
        engine.run()
    assert engine.num_loaded == (length - 1) // BLOCK


def test_with_windows_a_common_beginning_is_found_by_the_third_that_has_it(
    engines: list[MiniVllm],
) -> None:
    engine = over_tensors(**WINDOWS)
    engines.append(engine)
    common = request("common", seed=1, length=40).all_token_ids
    found = []
    for number in range(3):
        tail = request("tail", seed=10 + number, length=30).all_token_ids
        engine.add(MiniRequest(f"r{number}", common + tail))
        before = engine.num_loaded
        engine.run()
        found.append(engine.num_loaded - before)
    assert found == [0, 0, 40 // BLOCK]


def test_a_long_prompt_with_windows_copies_one_window_and_not_all(
    engines: list[MiniVllm],
) -> None:
    engine = over_tensors(**WINDOWS, chunk=8)
    engines.append(engine)
    engine.add(request("a", seed=1, length=100, max_tokens=1))
    engine.run()
    used = {(use.component, use.tier): use.used_pages for use in engine.manager.pools()}
    assert used["full", Tier.HOST] == 25
    assert used["window", Tier.HOST] == 4, "at the end of the prompt, and a page later"
    copied = engine.manager.operations.ended[OperationKind.BACKUP].count
    assert copied == 2


def test_counts_are_told_once_a_second_and_once(engines: list[MiniVllm]) -> None:
    engine = over_tensors()
    engines.append(engine)
    engine.add(request("a", seed=1, length=42))
    engine.run()
    engine.now[0] += 1
    assert engine.leader.take_counts()["backed_up_pages"] == 45 // BLOCK
    assert engine.leader.take_counts() == {}
    engine.now[0] += 1
    assert engine.leader.take_counts() == {}


def test_orders_travel_between_processes() -> None:
    orders = Orders(Setup("w", [4], 16), b"", {OperationId(3): "r"}, ["s"], {"t": []})
    assert pickle.loads(pickle.dumps(orders)) == orders  # vLLM's own way
