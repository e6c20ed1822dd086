"""What the engine makes of a model's errors. The accelerator that breaks is played by a mock here;
tests/gpu breaks a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quire.engine.batch import Batch
from quire.engine.executor import RankLost
from quire.engine.executor.local import LocalExecutor
from quire.errors import EngineError


def executor_that_raises(error: Exception) -> LocalExecutor:
    def launch(_: Batch) -> None:
        raise error

    rank = SimpleNamespace(worker=SimpleNamespace(), runner=SimpleNamespace(launch=launch))
    return LocalExecutor(rank, overlaps=True)  # type: ignore[arg-type]


def test_a_batch_that_is_too_large_says_what_to_lower() -> None:
    executor = executor_that_raises(torch.OutOfMemoryError("tried to allocate 2 GiB"))
    with pytest.raises(EngineError, match="lower device_memory, chunk_tokens or max_running"):
        executor.launch(Batch(1, []))


def test_other_errors_are_the_batchs_own() -> None:
    executor = executor_that_raises(ValueError("a page table is too short"))
    with pytest.raises(ValueError, match="page table"):
        executor.launch(Batch(1, []))


def test_an_accelerator_that_answers_nothing_any_more_is_lost(monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    executor = executor_that_raises(RuntimeError("illegal memory access"))
    with pytest.raises(RankLost, match="the accelerator is broken"):
        executor.launch(Batch(1, []))


def flying(num_tokens: int, looks: int) -> tuple[LocalExecutor, list[str]]:
    """A batch that is over at the so-manieth look, and what happens in which order."""
    told: list[str] = []

    class Flight:
        batch = SimpleNamespace(num_tokens=num_tokens)

        @property
        def is_over(self) -> bool:
            return told.count("heard") == looks

        def collect(self) -> None:
            told.append("collected")

    runner = SimpleNamespace(launch=lambda batch: Flight())
    rank = SimpleNamespace(worker=SimpleNamespace(), runner=runner)
    executor = LocalExecutor(rank, overlaps=True)  # type: ignore[arg-type]
    executor.launch(Batch(1, []))
    executor.collect(lambda: told.append("heard"))
    return executor, told


def test_while_a_long_batch_is_computed_the_workers_are_heard() -> None:
    _, told = flying(8192, looks=3)
    assert told == ["heard"] * 3 + ["collected"]


def test_nothing_comes_between_tokens_that_are_decoded() -> None:
    _, told = flying(64, looks=3)
    assert told == ["collected"]
