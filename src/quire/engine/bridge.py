"""AttentionBridge: from the attention layers of a model to our backends and pages.

It knows the batch under way, which layer keeps its keys and values in which pool, and waits for
what is still being loaded. It knows no model: forward/ calls it, layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.attention import AttentionBackend, BatchPacking, Heads, Target, pack
from quire.engine.attention.staging import Staging
from quire.engine.batch import Batch
from quire.engine.layouts import FULL, WINDOW, Place, attention_places
from quire.errors import ModelError, WorkerError
from quire.models import ModelShape
from quire.types import OperationId

_CPU = torch.device("cpu")


class LayerWaiter(Protocol):
    """The part of CacheWorker that the model needs."""

    def wait_layer(self, op: OperationId, layer: int, component: str = "full") -> None: ...


class Inputs(NamedTuple):
    """A batch as one packed row, on the device."""

    tokens: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor | None
    """Places in the row of the tokens whose logits are wanted; None: all of them."""
    states: torch.Tensor | None = None
    """Of each token's sequence: where its recurrent state is; −1: nowhere."""


class AttentionBridge:
    """Between the attention modules of one model and its backends."""

    def __init__(
        self,
        backends: Mapping[str, AttentionBackend],
        shape: ModelShape,
        waiter: LayerWaiter,
        *,
        page_size: int,
        device: torch.device = _CPU,
        has_draft: bool = False,
    ) -> None:
        """`backends`: by component, those that the model has attention for. `has_draft`: as of
        `layouts`."""
        self._backends = backends
        self._staging = Staging(device)
        self._places = attention_places(shape, has_draft=has_draft)
        self.windows = {FULL: 0, WINDOW: shape.window}
        """Tokens that a component's layers see; 0: all."""
        self._max_positions = shape.max_position_embeddings
        self._waiter = waiter
        self.page_size = page_size
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

    def begin(self, batch: Batch, drawn: torch.Tensor | None = None) -> Inputs:
        """Prepare for a batch, or a part of one. `drawn`: the tokens that some segments follow.

        Nothing waits for the device.
        """
        packing = self.plan(batch)
        ends = np.array(row_ends(batch), dtype=np.int64)
        arrays = [packing.tokens, packing.positions, ends]
        sources = _sources(batch, packing.tokens)
        if sources is not None:
            arrays.append(sources)
        tokens, positions, *rest = self._staging.send(arrays)
        if sources is not None:
            assert drawn is not None
            tokens = torch.cat((tokens, drawn)).index_select(0, rest[1])
        return Inputs(tokens, positions, None if len(ends) == len(packing.tokens) else rest[0])

    def plan(self, batch: Batch) -> BatchPacking:
        """Prepare the layers for a batch whose tokens somebody else knows."""
        packing = pack(batch, self.page_size)
        plans = {
            component: backend.plan(
                pack(batch, self.page_size, window)
                if (window := self.windows[component])
                else packing
            )
            for component, backend in self._backends.items()
        }
        self.enter(plans, {op for segment in batch.segments for op in segment.loads})
        return packing

    def enter(self, plans: dict[str, Any], loads: set[OperationId]) -> None:
        """Prepare for a batch by its backends' own plans."""
        self._plans, self._loads = plans, loads

    def wait(self, component: str, layer: int) -> None:
        """Until the loads of this batch have filled `layer` of a component's pool, or failed."""
        for op in self._loads:
            try:
                self._waiter.wait_layer(op, layer, component)
            except WorkerError as error:
                self.failed[op] = str(error)
        self._loads -= self.failed.keys()

    def wait_for_all(self, loads: set[OperationId]) -> None:
        """Until these have filled all layers, or failed: for whoever does not wait at each."""
        if loads:
            self._loads = loads
            for component in self._backends:
                layers = (p.layer for p in self._places.values() if p.component == component)
                self.wait(component, max(layers))
            self._loads = set()

    def target(self, layer: int) -> Target | None:
        """As of the layer's backend."""
        place = self._places[layer]
        found = self._backends[place.component].target(self._plans[place.component], place.layer)
        if found is not None and self._loads:
            self.wait(place.component, place.layer)
        return found

    def attend(
        self,
        layer: int,
        heads: Heads,
        *,
        scaling: float,
        window: int | None,
        sinks: torch.Tensor | None,
        is_appended: bool = False,
    ) -> torch.Tensor:
        place = self._places[layer]
        if (window or 0) != self.windows[place.component]:
            self._check_window(layer, window, self.windows[place.component])
        if self._loads and not is_appended:
            self.wait(place.component, place.layer)
        return self._backends[place.component].attend(
            self._plans[place.component],
            place.layer,
            heads,
            scaling=scaling,
            sinks=sinks,
            is_appended=is_appended,
        )

    def _check_window(self, layer: int, window: int | None, expected: int) -> None:
        if expected or (window or 0) < self._max_positions:
            raise ModelError(
                f"layer {layer} attends to a window of {window} tokens, its configuration says "
                f"{expected or 'all'}: models of this kind cannot be served yet"
            )


def row_ends(batch: Batch) -> list[int]:
    """Places in the packed row of the batch of the tokens after which one is drawn."""
    ends: list[int] = []
    end = 0
    for segment in batch.segments:
        end += segment.num_tokens
        ends += range(end - segment.num_rows, end)
    return ends


def _sources(batch: Batch, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Where each token is found among those known here and, after them, those drawn; None: all
    are known."""
    if all(segment.follows < 0 for segment in batch.segments):
        return None
    sources = np.arange(len(tokens))
    place = 0
    for segment in batch.segments:
        if segment.follows >= 0:
            sources[place] = len(tokens) + segment.follows
        place += segment.num_tokens
    return sources
