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
from quire.engine.bridge import ATTENTION, AttentionBridge, connect, register_attention
from quire.engine.layouts import FULL, RECURRENT, WINDOW
from quire.engine.parallel import shard
from quire.engine.runner import ModelRunner
from quire.engine.states import States
from quire.models import ModelShape, describe, load_model
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
    shape: ModelShape
    page_size: int

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
        runner = _runner(config, model, shape, worker)
    except BaseException:
        worker.close()
        raise
    return Rank(worker, runner, shape, worker.components[FULL].device.layout.page_size)


def _runner(
    config: RankConfig, model: torch.nn.Module, shape: ModelShape, worker: CacheWorker
) -> ModelRunner:
    pools = {name: pools.device for name, pools in worker.components.items()}
    windows = {FULL: 0, WINDOW: shape.window}
    bridge = AttentionBridge(
        {
            name: open_attention(config.attention, pools[name], window)
            for name, window in windows.items()
            if name in pools
        },
        shape,
        worker,
        page_size=pools[FULL].layout.page_size,
    )
    connect(model, bridge)
    states = None
    if shape.recurrent_layers:
        states = States(
            pools[RECURRENT],
            shape.state_layout(config.dtype),
            shape.recurrent_layers,
            lambda layer: bridge.wait(RECURRENT, layer),
        )
    return ModelRunner(
        model, bridge, device=pools[FULL].device, states=states, samples=worker.rank == 0
    )


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
