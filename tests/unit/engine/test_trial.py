"""The trial that says how much of a device is left for pages: its batch, and its sum."""

from dataclasses import replace

import msgspec
import pytest
import torch

from dense_models import DENSE
from quire.engine import build
from quire.engine.config import EngineConfig
from quire.engine.executor import trial
from quire.engine.executor.rank import RankConfig, build_rank
from quire.engine.executor.trial import largest_batch, try_out
from quire.engine.layouts import layouts
from quire.errors import MemoryBudgetError
from quire.models import describe
from quire.types import page_array
from quire.worker import ComponentConfig, WorkerConfig

PAGE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial") / "llama"
    DENSE["llama"](folder)
    return folder


def configs(directory):
    shape = describe(directory)
    (layout,) = layouts(shape, dtype="float32", page_size=PAGE, kv_heads=shape.num_kv_heads)
    worker = WorkerConfig(0, 1, "m", [ComponentConfig(layout, 1000, 1000)])
    return RankConfig(str(directory), "float32", 1, max_rows=3, chunk_tokens=70), worker


class FakeMemory:
    total_bytes = 1000

    def __init__(self, device):
        self.acted = 0

    def free_bytes(self):
        return 600

    def peak_bytes(self, act):
        act()
        return 100


def test_the_batch_is_a_chunk_at_the_end_of_the_longest_prompt_and_rows_that_decode():
    config = RankConfig("m", "float32", 1, max_rows=3, chunk_tokens=70)
    prompt, *singles = largest_batch(config, PAGE, 512).segments
    assert (prompt.num_tokens, prompt.start) == (70, 432)
    assert page_array(prompt.pages).tolist() == [0] * 27 + [2, 3, 4, 5, 6]
    assert [(one.num_tokens, one.start) for one in singles] == [(1, 511)] * 2
    assert page_array(singles[0].pages).tolist() == [0] * 31 + [1]
    assert all(segment.row is not None for segment in (prompt, *singles))


def test_what_is_left_is_room_and_the_model_is_used_again(directory):
    config, worker = configs(directory)
    model, room = try_out(config, worker, max_context=512, memory=FakeMemory)
    assert room == 600 - 100 - 50
    small = ComponentConfig(worker.components[0].layout, 8, 0)
    rank = build_rank(config, WorkerConfig(0, 1, "m", [small]), model=model)
    rank.close()


def test_a_batch_that_does_not_fit_says_what_to_lower(directory):
    class Full(FakeMemory):
        def peak_bytes(self, act):
            raise torch.OutOfMemoryError("full")

    config, worker = configs(directory)
    with pytest.raises(MemoryBudgetError, match="chunk_tokens"):
        try_out(config, worker, max_context=512, memory=Full)


def planned(directory, **options):
    config = EngineConfig(
        model=str(directory),
        name="m",
        device="cuda",
        page_size=PAGE,
        device_bytes=1 << 20,
        measure_device=True,
        **options,
    )
    return build._plan(config)


def test_an_engine_has_the_room_that_its_trial_found(directory, monkeypatch):
    asked = []

    def fake(config, worker_config, *, max_context):
        asked.append((config.chunk_tokens, max_context))
        return "the model", 4 << 20

    monkeypatch.setattr(trial, "try_out", fake)
    plan = planned(directory)
    found, model = build._tried(plan)
    assert model == "the model"
    assert found.sizes["full"].device == (4 << 20) // plan.ranks[0][0].page_bytes
    assert asked == [(512, 512)]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"tp": 3}, {"measure_device": False}])
def test_memory_that_was_given_or_cannot_be_tried_stays(directory, options):
    plan = planned(directory)
    plan = replace(plan, config=msgspec.structs.replace(plan.config, **options))
    assert build._tried(plan) == (plan, None)
