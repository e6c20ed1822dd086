"""One rank: its share of the model, its pages, and the worker that moves them.

The same in the engine's own process and in a process of its own.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from quire.engine.attention import AttentionBackend, open_attention
from quire.engine.bridge import AttentionBridge
from quire.engine.config import AttentionKind, ForwardKind
from quire.engine.draft.drafter import Drafter, Drafts
from quire.engine.draft.eagle import EagleHead
from quire.engine.draft.headweights import assemble, draft_target, read_spec, read_tensors
from quire.engine.draft.trees import TreeDrafter
from quire.engine.executor.rehearsal import rehearse
from quire.engine.forward import Forward, choose
from quire.engine.forward.assembly import Limits, in_graphs, open_dense, ops_of, replayed
from quire.engine.forward.dense import DenseModel, load_dense
from quire.engine.forward.transformers import ATTENTION, TransformersForward, register_attention
from quire.engine.layouts import FULL, RECURRENT, WINDOW
from quire.engine.parallel import AllReduce, shard
from quire.engine.recurrent_states import RecurrentStates
from quire.engine.runner import ModelRunner
from quire.engine.sampling import open_sampler
from quire.models import ModelShape, describe, load_model
from quire.progress import Share
from quire.worker import WorkerConfig, build_worker

if TYPE_CHECKING:
    import torch

    from quire.worker.worker import CacheWorker

_logger = logging.getLogger(__name__)

_COLLECTIVE_TIMEOUT_S = 300
_SWITCH_S = 1e-4
"""Launching a batch lets go of the interpreter a thousand times, and threads that read files take
it: how long they may keep it. Measured beside eight of them: 448 tokens in 25 ms, not in 43."""

Model: TypeAlias = "DenseModel | torch.nn.Module"


class RankConfig(msgspec.Struct, frozen=True):
    """What a rank needs beside its worker's configuration."""

    model: str
    dtype: str
    threads: int
    rendezvous: str = ""
    """File through which the ranks find each other; empty: there is only one."""
    attention: AttentionKind = AttentionKind.AUTO
    forward: ForwardKind = ForwardKind.AUTO
    overlap: bool | None = None
    """Launch a batch before the one ahead of it has ended; None: where that is faster."""
    max_rows: int = 32
    """Tokens drawn together, at most."""
    graph_batch: int = 0
    """Sequences in the largest batch that is replayed as a CUDA graph; 0: none is."""
    chunk_tokens: int = 0
    """Of one prompt in one batch: attention of so many is made ready at start; 0: of none."""
    head: str = ""
    """Directory of a draft head; empty: there is none."""
    max_drafts: int = 0
    """Tokens proposed for one request, by whomever."""
    branches: int = 0
    """Of the trees that a head proposes; 0: chains."""


@dataclass(frozen=True, slots=True)
class Rank:
    worker: CacheWorker
    runner: ModelRunner
    shape: ModelShape
    page_size: int

    def close(self) -> None:
        self.worker.close()


def build_rank(
    config: RankConfig,
    worker_config: WorkerConfig,
    progress: Share | None = None,
    model: Model | None = None,
) -> Rank:
    """Load, split, allocate, connect. `model`: as `load` gave it, and not split yet. Raises
    ModelError, ConfigError, MemoryBudgetError."""
    import torch

    torch.set_num_threads(config.threads)
    if torch.device(worker_config.device).type == "cuda":
        sys.setswitchinterval(_SWITCH_S)
    if torch.device(worker_config.device).index is not None:
        torch.cuda.set_device(worker_config.device)  # where kernels of our own are launched
    shape = describe(Path(config.model))
    model = model or load(config, worker_config)
    all_reduce = None
    if worker_config.num_ranks > 1:
        all_reduce = _join(config, worker_config)
        if not isinstance(model, DenseModel):
            shard(model, shape, worker_config.rank, worker_config.num_ranks, all_reduce)
            torch.nn.Module.to(model, worker_config.device)
    worker = build_worker(
        worker_config,
        progress=None
        if progress is None
        else (lambda done, total: progress("memory", done / total)),
    )
    try:
        backends = _backends(config, shape, worker)
        bridge = _bridge(backends, shape, worker, has_draft=bool(config.head))
        forward: Forward
        drafter: Drafts | None = None
        taps: tuple[int, ...] = ()
        limits = Limits(
            config.graph_batch,
            config.chunk_tokens,
            shape.max_position_embeddings,
            config.max_drafts,
        )
        tell = progress or (lambda _what, _done: None)
        if isinstance(model, DenseModel):
            head = None
            if config.head:
                head, taps = _drafter(Path(config.head), model, bridge, shape)
            forward = open_dense(
                model, bridge, backends, all_reduce, limits=limits, progress=tell, taps=taps
            )
            if head is not None and not config.branches:
                drafter = replayed(head, forward, bridge, backends, config.max_drafts)
            if head is not None and config.branches:
                pool = worker.components[FULL].device
                drafter = TreeDrafter(head, pool, branches=config.branches)
        else:
            modules = _through_transformers(config, model, bridge, shape, worker)
            forward = _in_graphs(modules, bridge, backends, limits, tell)
        if config.graph_batch and torch.device(worker_config.device).type == "cuda":
            _rehearse(forward, shape, worker, config.chunk_tokens, tell)
    except BaseException:
        worker.close()
        raise
    sampler = None
    if worker.rank == 0:
        device = worker.components[FULL].device.device
        dtype = getattr(torch, config.dtype)
        sampler = open_sampler(device, shape.vocab_size, config.max_rows, dtype)
    runner = ModelRunner(forward, sampler, drafter)
    return Rank(worker, runner, shape, worker.components[FULL].device.layout.page_size)


def load(config: RankConfig, worker_config: WorkerConfig) -> Model:
    """Our own model in its share; transformers' whole, in main memory if it is to be split, so
    that no device holds it whole."""
    import torch

    directory, num_ranks = Path(config.model), worker_config.num_ranks
    dtype, device = getattr(torch, config.dtype), torch.device(worker_config.device)
    if choose(directory, config.forward).kind is ForwardKind.DENSE:
        return load_dense(
            directory, dtype=dtype, device=device, rank=worker_config.rank, num_ranks=num_ranks
        )
    register_attention()
    where = device if num_ranks == 1 else torch.device("cpu")
    return load_model(directory, dtype=dtype, device=where, attention=ATTENTION)


def _backends(
    config: RankConfig, shape: ModelShape, worker: CacheWorker
) -> dict[str, AttentionBackend]:
    windows = {FULL: 0, WINDOW: shape.window}
    return {
        name: open_attention(config.attention, worker.components[name].device, window)
        for name, window in windows.items()
        if name in worker.components
    }


def _bridge(
    backends: dict[str, AttentionBackend],
    shape: ModelShape,
    worker: CacheWorker,
    *,
    has_draft: bool,
) -> AttentionBridge:
    pool = worker.components[FULL].device
    return AttentionBridge(
        backends,
        shape,
        worker,
        page_size=pool.layout.page_size,
        device=pool.device,
        has_draft=has_draft,
    )


def _drafter(
    directory: Path, model: DenseModel, bridge: AttentionBridge, shape: ModelShape
) -> tuple[Drafter, tuple[int, ...]]:
    """A head for the model, and the layers that it looks at. Raises ConfigError."""
    spec = read_spec(directory, draft_target(shape, model.spec.hidden_size))
    weights = assemble(
        spec, read_tensors(directory, spec), model.weights.embedding, model.weights.head
    )
    head = EagleHead(spec, weights.packed(), ops_of(spec.decoder, model))
    device = model.weights.embedding.device
    return Drafter(head, bridge, layer=shape.num_layers, device=device), spec.layers


def _through_transformers(
    config: RankConfig,
    model: torch.nn.Module,
    bridge: AttentionBridge,
    shape: ModelShape,
    worker: CacheWorker,
) -> TransformersForward:
    states = None
    if shape.recurrent_layers:
        states = RecurrentStates(
            worker.components[RECURRENT].device,
            shape.state_layout(config.dtype),
            shape.recurrent_layers,
            lambda layer: bridge.wait(RECURRENT, layer),
        )
    return TransformersForward(model, bridge, states=states)


def _in_graphs(
    forward: TransformersForward,
    bridge: AttentionBridge,
    backends: dict[str, AttentionBackend],
    limits: Limits,
    progress: Share,
) -> Forward:
    """If its code allows it: nobody has asked whoever wrote the modules."""
    try:
        return in_graphs(
            forward, bridge, backends, limits=limits, progress=progress, is_careful=True
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        _logger.warning("decode steps are not replayed as CUDA graphs: %s", reason)
        return forward


def _rehearse(
    forward: Forward, shape: ModelShape, worker: CacheWorker, chunk_tokens: int, progress: Share
) -> None:
    import torch

    if list(worker.components) != [FULL]:
        return
    pool = worker.components[FULL].device
    with torch.inference_mode():
        rehearse(
            forward,
            page_size=pool.layout.page_size,
            num_pages=pool.num_pages,
            max_positions=shape.max_position_embeddings,
            chunk_tokens=chunk_tokens,
            progress=lambda done: progress("kernels", done),
        )


def _join(config: RankConfig, worker_config: WorkerConfig) -> AllReduce:
    """Meet the other ranks; returns how to add up a tensor over all of them."""
    import torch
    from torch import distributed

    device = torch.device(worker_config.device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{config.rendezvous}",
        rank=worker_config.rank,
        world_size=worker_config.num_ranks,
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_S),
    )
    # Connections are made now, not with the first request; the file is not needed any more then.
    distributed.all_reduce(torch.zeros(1, device=device))
    return distributed.all_reduce
