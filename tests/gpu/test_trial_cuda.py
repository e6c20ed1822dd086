"""A trial on a real device: what is left for pages is less than what is free, and not much less."""

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


def test_a_trial_measures_the_largest_batch(tmp_path):
    DENSE["llama"](tmp_path / "llama")
    shape = describe(tmp_path / "llama")
    own = layouts(shape, dtype="float32", page_size=16, kv_heads=shape.num_kv_heads)
    worker = WorkerConfig(0, 1, "m", [ComponentConfig(own[0], 1, 0)], device="cuda")
    config = RankConfig(str(tmp_path / "llama"), "float32", 1, max_rows=8, chunk_tokens=256)
    peaks = []

    class Watched:
        def __init__(self, device):
            from quire.engine.executor.trial import CudaMemory

            self._memory = CudaMemory(device)
            self.total_bytes = self._memory.total_bytes
            self.free_bytes = self._memory.free_bytes

        def peak_bytes(self, act):
            peaks.append(self._memory.peak_bytes(act))
            return peaks[-1]

    _, room = try_out(config, worker, max_context=512, memory=Watched)
    assert 0 < room < torch.cuda.mem_get_info()[1]
    assert peaks[0] > 8 * shape.vocab_size * 4  # the logits, at least
