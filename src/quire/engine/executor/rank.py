"""One rank: its share of the model, its pages, and the worker that moves them.

The same in the engine's own process and in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.attention import open_attention
from quire.engine.parallel import shard
from quire.engine.runner import (
    ATTENTION,
    AttentionBridge,
    ModelRunner,
    connect,
    register_attention,
)
from quire.models import describe, load_model
from quire.worker import WorkerConfig, build_worker

if TYPE_CHECKING:
    import torch

    from quire.worker.worker import CacheWorker

_COLLECTIVE_TIMEOUT_S = 300

Progress = Callable[[str, float], None]


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank needs beside its worker's configuration."""

    model: str
    dtype: str
    threads: int
    rendezvous: str = ""
    """File through which the ranks find each other; empty: there is only one."""
    attention: str = "torch"


@dataclass(frozen=True, slots=True)
class Rank:
    worker: CacheWorker
    runner: ModelRunner

    def close(self) -> None:
        self.worker.close()


def build_rank(
    config: RankConfig, worker_config: WorkerConfig, progress: Progress | None = None
) -> Rank:
    """Load, split, allocate, connect. Raises ModelError, ConfigError, MemoryBudgetError."""
    import torch

    torch.set_num_threads(config.threads)
    device = torch.device(worker_config.device)
    rank, num_ranks = worker_config.rank, worker_config.num_ranks
    directory = Path(config.model)
    shape = describe(directory)
    register_attention()
    dtype = getattr(torch, config.dtype)
    alone = num_ranks == 1
    # A model that is to be split is read into main memory first, so that no device holds it whole.
    model = load_model(
        directory, dtype=dtype, device=device if alone else torch.device("cpu"), attention=ATTENTION
    )
    if not alone:
        shard(model, shape, rank, num_ranks, _join(config, rank, num_ranks, device))
        torch.nn.Module.to(model, device)
    worker = build_worker(
        worker_config,
        progress=None
        if progress is None
        else (lambda done, total: progress("memory", done / total)),
    )
    try:
        bridge = AttentionBridge(
            open_attention(config.attention, worker.components["full"].device), worker
        )
        connect(model, bridge, shape.num_layers)
    except BaseException:
        worker.close()
        raise
    page_size = worker_config.components[0].layout.page_size
    runner = ModelRunner(
        model, bridge, page_size=page_size, device=device, samples=worker_config.rank == 0
    )
    return Rank(worker, runner)


def _join(
    config: RankConfig, rank: int, num_ranks: int, device: torch.device
) -> Callable[[torch.Tensor], None]:
    """Meet the other ranks; returns how to add up a tensor over all of them."""
    import torch
    from torch import distributed

    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{config.rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
    )
    # Connections are made now, not with the first request; the file is not needed any more then.
    distributed.all_reduce(torch.zeros(1, device=device))
    return distributed.all_reduce
