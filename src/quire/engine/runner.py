"""ModelRunner: one rank's model, run over packed batches with its keys and values in Quire's pages.

The model is any decoder of transformers. Its attention is ours, through transformers' attention
interface: every attention module is given a reference to this runner's AttentionBridge, which
knows the batch under way. Sampling is done here too, where the logits are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from quire.engine.attention import AttentionBackend, pack
from quire.engine.batch import Batch, BatchResult, SegmentResult
from quire.engine.sampling import sample
from quire.errors import ModelError, WorkerError
from quire.types import OperationId

ATTENTION = "quire"
"""Our name in transformers' attention interface."""
_BRIDGE = "_quire_bridge"


class LayerWaiter(Protocol):
    """The part of CacheWorker that the model needs."""

    def wait_layer(self, op: OperationId, layer: int, component: str = "full") -> None: ...


class AttentionBridge:
    """Between the attention modules of one model and its backend."""

    def __init__(self, backend: AttentionBackend, waiter: LayerWaiter) -> None:
        self._backend = backend
        self._waiter = waiter
        self._plan: Any = None
        self._loads: set[OperationId] = set()
        self.failed: dict[OperationId, str] = {}
        """Loads of this batch that did not arrive."""

    def begin(self, batch: Batch, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare for a batch; returns its tokens and positions, each [1, row]."""
        packing = pack(batch, page_size)
        self._plan = self._backend.plan(packing)
        self._loads = {op for segment in batch.segments for op in segment.loads}
        self.failed = {}
        return torch.from_numpy(packing.tokens)[None], torch.from_numpy(packing.positions)[None]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
    ) -> torch.Tensor:
        for op in self._loads:
            try:
                self._waiter.wait_layer(op, layer)
            except WorkerError as error:
                self.failed[op] = str(error)
        self._loads -= self.failed.keys()
        return self._backend.attend(self._plan, layer, query, key, value, scaling=scaling)


def register_attention() -> None:
    """Make our attention known to transformers. Harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_mask: object,
    scaling: float | None = None,
    **_options: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, row, dim], key and value [1, kv heads, row, dim] → [1, row, heads, dim]."""
    bridge: AttentionBridge = getattr(module, _BRIDGE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return bridge.attend(layer, query[0], key[0], value[0], scaling=scale)[None], None


def connect(model: torch.nn.Module, bridge: AttentionBridge, num_layers: int) -> None:
    """Give every attention module its bridge. Raises ModelError if the model has other layers."""
    layers = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "k_proj")
    ]
    found = sorted(module.layer_idx for module in layers)  # type: ignore[type-var]
    if found != list(range(num_layers)):
        raise ModelError(
            f"the model has attention in layers {found}, its configuration says "
            f"{num_layers} layers: models of this kind cannot be served yet"
        )
    for module in layers:
        setattr(module, _BRIDGE, bridge)


class ModelRunner:
    def __init__(
        self,
        model: torch.nn.Module,
        bridge: AttentionBridge,
        *,
        page_size: int,
        device: torch.device,
        samples: bool = True,
    ) -> None:
        """`samples`: this rank picks the tokens."""
        self._model = model
        self._bridge = bridge
        self._page_size = page_size
        self._device = device
        self._samples = samples

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        tokens, positions = self._bridge.begin(batch, self._page_size)
        ends: list[int] = []
        end = 0
        for segment in batch.segments:
            end += segment.num_tokens
            if segment.row is not None:
                ends.append(end - 1)
        wanted = torch.tensor(ends or [0], device=self._device)
        output = self._model(
            input_ids=tokens.to(self._device),
            position_ids=positions.to(self._device),
            use_cache=False,
            logits_to_keep=wanted,
        )
        logits = output.logits[0]  # [segments with a row, vocabulary]
        rows = [segment.row for segment in batch.segments if segment.row is not None]
        sampled = iter(sample(logits, rows) if self._samples and rows else [])
        failed = self._bridge.failed
        results = []
        for segment in batch.segments:
            token = next(sampled, None) if segment.row is not None else None
            reasons = [failed[op] for op in segment.loads if op in failed]
            results.append(
                SegmentResult(failed=reasons[0]) if reasons else SegmentResult(sampled=token)
            )
        return BatchResult(batch.number, results)
