"""AttentionBridge: from the attention layers of a model to our backends and pages.

It knows the batch under way, which layer keeps its keys and values in which pool, and waits for
what is still being loaded. It knows no model: forward/ calls it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from quire.engine.attention import AttentionBackend, pack
from quire.engine.batch import Batch
from quire.engine.layouts import FULL, WINDOW, Place, attention_places
from quire.errors import ModelError, WorkerError
from quire.models import ModelShape
from quire.types import OperationId


class LayerWaiter(Protocol):
    """The part of CacheWorker that the model needs."""

    def wait_layer(self, op: OperationId, layer: int, component: str = "full") -> None: ...


class AttentionBridge:
    """Between the attention modules of one model and its backends."""

    def __init__(
        self,
        backends: Mapping[str, AttentionBackend],
        shape: ModelShape,
        waiter: LayerWaiter,
        *,
        page_size: int,
    ) -> None:
        """`backends`: by component, those that the model has attention for."""
        self._backends = backends
        self._places = attention_places(shape)
        self._windows = {FULL: 0, WINDOW: shape.window}
        self._max_positions = shape.max_position_embeddings
        self._waiter = waiter
        self._page_size = page_size
        self._plans: dict[str, Any] = {}
        self._loads: set[OperationId] = set()
        self.failed: dict[OperationId, str] = {}
        """Loads that did not arrive, since `forget`."""

    @property
    def places(self) -> dict[int, Place]:
        return self._places

    def forget(self) -> None:
        """A new batch begins: what failed before is not its business."""
        self.failed = {}

    def begin(
        self, batch: Batch, drawn: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare for a batch, or a part of one; returns its tokens and positions, each [row]."""
        packing = pack(batch, self._page_size)
        self._plans = {
            component: backend.plan(
                pack(batch, self._page_size, window)
                if (window := self._windows[component])
                else packing
            )
            for component, backend in self._backends.items()
        }
        self._loads = {op for segment in batch.segments for op in segment.loads}
        tokens = torch.from_numpy(packing.tokens)
        if drawn is not None:
            first = 0
            for segment in batch.segments:
                if segment.follows >= 0:
                    tokens[first] = drawn[segment.follows]
                first += segment.num_tokens
        return tokens, torch.from_numpy(packing.positions)

    def wait(self, component: str, layer: int) -> None:
        """Until the loads of this batch have filled `layer` of a component's pool, or failed."""
        for op in self._loads:
            try:
                self._waiter.wait_layer(op, layer, component)
            except WorkerError as error:
                self.failed[op] = str(error)
        self._loads -= self.failed.keys()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        place = self._places[layer]
        if (window or 0) != self._windows[place.component]:
            self._check_window(layer, window, self._windows[place.component])
        if self._loads:
            self.wait(place.component, place.layer)
        return self._backends[place.component].attend(
            self._plans[place.component],
            place.layer,
            query,
            key,
            value,
            scaling=scaling,
            sinks=sinks,
        )

    def _check_window(self, layer: int, window: int | None, expected: int) -> None:
        if expected or (window or 0) < self._max_positions:
            raise ModelError(
                f"layer {layer} attends to a window of {window} tokens, its configuration says "
                f"{expected or 'all'}: models of this kind cannot be served yet"
            )
