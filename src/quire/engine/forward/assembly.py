"""From a model to what computes it here: torch's operations, or all that CUDA allows.

Knows which of our kernels there are. What it makes ready at start costs no request any time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quire.engine.attention import AttentionBackend
from quire.engine.bridge import AttentionBridge
from quire.engine.draft.drafter import Drafter, Drafts
from quire.engine.forward.base import Capturable, Forward
from quire.engine.forward.dense import DenseForward, DenseModel, num_kv_heads
from quire.engine.forward.ops import Ops, TorchOps
from quire.engine.forward.spec import DenseSpec
from quire.engine.forward.taps import Taps
from quire.engine.kernels import available
from quire.engine.layouts import FULL
from quire.engine.parallel import AllReduce
from quire.progress import Share

if TYPE_CHECKING:
    from quire.engine.attention.triton import TritonAttention

_logger = logging.getLogger(__name__)


MAX_SHORT = 256
"""Tokens of the largest batch of prompts' ends that is replayed; see graphs.py."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is made ready for."""

    graph_batch: int
    """Sequences in the largest batch that is replayed as a CUDA graph; 0: none is."""
    chunk_tokens: int
    """Of one prompt in one batch; 0: nothing is made ready."""
    max_positions: int
    max_drafts: int = 0
    """Tokens proposed for one sequence."""


def open_dense(
    model: DenseModel,
    bridge: AttentionBridge,
    backends: Mapping[str, AttentionBackend],
    all_reduce: AllReduce | None,
    *,
    limits: Limits,
    progress: Share,
    taps: Sequence[int] = (),
) -> Forward:
    """`backends`: those of the bridge. `taps`: layers that a draft head looks at."""
    tapped = Taps(taps, model.weights.embedding, max_steady(limits) if taps else 0)
    dense = DenseForward(model, bridge, all_reduce, ops_of(model.spec, model), tapped)
    if not _has_kernels(model):
        return dense
    ours, spec = _ours(backends), model.spec
    for done, backend in enumerate(ours.values()):
        progress("attention", done / len(ours))
        backend.prepare(
            spec.num_q_heads // spec.num_kv_heads * num_kv_heads(model),
            spec.scaling,
            max_queries=limits.chunk_tokens,
            max_keys=limits.max_positions,
        )
    return in_graphs(dense, bridge, backends, limits=limits, progress=progress)


def max_steady(limits: Limits) -> int:
    """Tokens of the largest batch that is replayed."""
    if not limits.graph_batch:
        return 0
    return max(MAX_SHORT, limits.graph_batch * (1 + limits.max_drafts))


def in_graphs(
    forward: Capturable,
    bridge: AttentionBridge,
    backends: Mapping[str, AttentionBackend],
    *,
    limits: Limits,
    progress: Share,
    is_careful: bool = False,
) -> Forward:
    """Small batches are replayed as CUDA graphs, where that is possible. `backends`: those of the
    bridge. `is_careful`: RuntimeError if its code does not allow that."""
    if not (limits.graph_batch and torch.cuda.is_available() and available()):
        return forward
    from quire.engine.forward.graphs import CudaCapture, GraphForward

    ours = _ours(backends)
    if len(ours) < len(backends):
        return forward
    began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    graphs = GraphForward(
        forward,
        bridge,
        ours,
        max_batch=limits.graph_batch,
        max_pages=-(-limits.max_positions // bridge.page_size),
        capture=CudaCapture(is_careful=is_careful),
        progress=lambda share: progress("graphs", share),
        max_drafts=limits.max_drafts,
    )
    _logger.info(
        "%d graphs of up to %d sequences captured in %.1f s; they take %d MiB",
        graphs.num_graphs,
        limits.graph_batch,
        time.perf_counter() - began,
        (free - torch.cuda.mem_get_info()[0]) >> 20,
    )
    return graphs


def replayed(
    drafter: Drafter,
    forward: Forward,
    bridge: AttentionBridge,
    backends: Mapping[str, AttentionBackend],
    max_tokens: int,
) -> Drafts:
    """The same, in graphs too if `forward` is. `max_tokens`: proposed for one sequence."""
    if not (torch.cuda.is_available() and available()):
        return drafter
    from quire.engine.draft.graph_drafter import GraphDrafter
    from quire.engine.forward.graphs import GraphForward

    if not isinstance(forward, GraphForward):
        return drafter
    full = _ours(backends)[FULL]
    return GraphDrafter(drafter, forward, bridge, full, max_tokens=max_tokens)


def _ours(backends: Mapping[str, AttentionBackend]) -> dict[str, TritonAttention]:
    from quire.engine.attention.triton import TritonAttention

    return {name: found for name, found in backends.items() if isinstance(found, TritonAttention)}


def ops_of(spec: DenseSpec, model: DenseModel) -> Ops:
    """For a decoder of this spec that runs where the model does."""
    if not _has_kernels(model):
        return TorchOps(spec, num_kv_heads(model))
    from quire.engine.forward.fused import FusedOps

    return FusedOps(spec, num_kv_heads(model))


def _has_kernels(model: DenseModel) -> bool:
    where: torch.device = model.weights.embedding.device
    return where.type == "cuda" and available()
