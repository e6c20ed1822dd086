"""A trial on a real device: it runs, and leaves room for pages, but not all of the device."""

import pytest
import torch

from dense_models import DENSE
from quire.engine.executor.rank import RankConfig
from quire.engine.executor.trial import try_out
from quire.engine.layouts import layouts
from quire.models import describe
from quire.worker import ComponentConfig, WorkerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_trial_leaves_room_for_pages(tmp_path):
    DENSE["llama"](tmp_path / "llama")
    shape = describe(tmp_path / "llama")
    own = layouts(shape, dtype="float32", page_size=16, kv_heads=shape.num_kv_heads)
    worker = WorkerConfig(0, 1, "m", [ComponentConfig(own[0], 1, 0)], device="cuda")
    config = RankConfig(str(tmp_path / "llama"), "float32", 1, max_rows=8, chunk_tokens=256)
    _, room = try_out(config, worker, max_context=512)
    assert 0 < room < torch.cuda.mem_get_info()[1]
