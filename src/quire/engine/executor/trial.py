"""A trial: the model is loaded and its largest batch computed once, to see what it needs beside
its weights. What is left of the device then is room for pages.

The batch is as large as one may be: a whole chunk at the end of the longest prompt, and beside it
as many requests that decode as may run. Its pages are few: what comes before the chunk is one page
over and over, since only sizes matter here. Knows the only rank of an engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import torch

from quire.engine.batch import Batch, Segment
from quire.engine.executor.rank import Model, RankConfig, build_rank, load
from quire.engine.messages import SamplingParams
from quire.engine.sampling import Row
from quire.errors import MemoryBudgetError
from quire.types import PageIds, RequestId, page_ids
from quire.worker import ComponentConfig, WorkerConfig

_KEPT_SHARE = 0.05
"""Of the whole device: for graphs, which are captured later, and for what splits memory up."""
_PARAMS = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95)


class TrialMemory(Protocol):
    total_bytes: int

    def free_bytes(self) -> int:
        """Of the device, by its driver, when everything that is held for nobody is given back."""

    def peak_bytes(self, act: Callable[[], object]) -> int:
        """Taken by it at most, beside what was taken before."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total_bytes = torch.cuda.mem_get_info(device)[1]

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, act: Callable[[], object]) -> int:
        self.free_bytes()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        act()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


def try_out(
    config: RankConfig,
    worker_config: WorkerConfig,
    *,
    max_context: int,
    memory: Callable[[torch.device], TrialMemory] = CudaMemory,
) -> tuple[Model, int]:
    """The model, and how many bytes the pages of its rank may have. Raises ModelError,
    MemoryBudgetError."""
    model = load(config, worker_config)
    device = memory(torch.device(worker_config.device))
    peak = _peak_bytes(config, worker_config, model, max_context, device)
    room = device.free_bytes() - peak - int(device.total_bytes * _KEPT_SHARE)
    return model, max(0, room)


def _peak_bytes(
    config: RankConfig,
    worker_config: WorkerConfig,
    model: Model,
    max_context: int,
    device: TrialMemory,
) -> int:
    """Nothing of the rank is left afterwards but the model."""
    page_size = worker_config.components[0].layout.page_size
    num_pages = -(-config.chunk_tokens // page_size) + 2
    pools = [
        ComponentConfig(component.layout, num_pages, 0) for component in worker_config.components
    ]
    rank = build_rank(
        msgspec.structs.replace(config, graph_batch=0),
        msgspec.structs.replace(worker_config, components=pools, peer=None),
        model=model,
    )
    batch = largest_batch(config, page_size, max_context)
    try:
        return device.peak_bytes(lambda: rank.runner.run(batch))
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"beside its weights the device cannot compute {config.chunk_tokens} tokens at once: "
            "lower chunk_tokens or max_running"
        ) from error
    finally:
        rank.close()


def largest_batch(config: RankConfig, page_size: int, max_context: int) -> Batch:
    """On pages 0 (whatever comes before), 1 (decoding), and 2 and on (the chunk)."""
    chunk = min(config.chunk_tokens, max_context)
    start = (max_context - chunk) // page_size * page_size
    before = [0] * (start // page_size)
    prompt = page_ids([*before, *range(2, 2 + -(-chunk // page_size))])
    singles = page_ids([0] * ((max_context - 1) // page_size) + [1])
    segments = [_segment(0, chunk, start, prompt)]
    segments += [_segment(i, 1, max_context - 1, singles) for i in range(1, config.max_rows)]
    return Batch(0, segments)


def _segment(number: int, num_tokens: int, start: int, pages: PageIds) -> Segment:
    tokens = np.arange(num_tokens, dtype="<i4") % 2
    row = Row(params=_PARAMS, position=0)
    return Segment(RequestId(f"trial-{number}"), tokens.tobytes(), start, pages, [], row)
