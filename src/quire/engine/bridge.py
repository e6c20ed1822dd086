"""AttentionBridge: from the attention modules of a transformers model to our backends and pages.

Every attention module is given a reference to the bridge, which knows the batch under way. It
knows which layer keeps its keys and values in which pool, and waits for what is still being loaded.
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

ATTENTION = "quire"
"""Our name in transformers' attention interface."""
_BRIDGE = "_quire_bridge"

_HARMLESS = frozenset(
    (
        "attention_mask",
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "use_cache",
    )
)
"""What models pass along with their queries that changes nothing in our attention."""


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

    def begin(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
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
        return torch.from_numpy(packing.tokens), torch.from_numpy(packing.positions)

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
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """query [sequences, heads, tokens, dim], key and value alike but of kv heads
    → [sequences, tokens, heads, dim]; the tokens of all sequences are one packed row."""
    if is_causal is False or options.keys() - _HARMLESS:
        _check_options(is_causal, options)
    bridge: AttentionBridge = getattr(module, _BRIDGE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    attended = bridge.attend(
        layer,
        _row(query),
        _row(key),
        _row(value),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        sinks=s_aux,
    )
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _row(tensor: torch.Tensor) -> torch.Tensor:
    """[sequences, heads, tokens, dim] → [heads, sequences × tokens, dim]"""
    return tensor[0] if tensor.shape[0] == 1 else tensor.transpose(0, 1).flatten(1, 2)


def _check_options(is_causal: bool | None, options: Mapping[str, object]) -> None:
    """Raises ModelError rather than leave something out of the computation."""
    if is_causal is False:
        raise ModelError("the model's attention looks ahead: it cannot be served")
    for name in sorted(options.keys() - _HARMLESS):
        # Flags say what a caller wants to have returned.
        if options[name] is not None and not isinstance(options[name], bool):
            raise ModelError(f"the model's attention needs {name!r}, which is not supported yet")


def connect(model: torch.nn.Module, bridge: AttentionBridge) -> None:
    """Give every attention module its bridge. Raises ModelError if the model has others."""
    layers = [module for module in model.modules() if _attends(module)]
    found = sorted(module.layer_idx for module in layers)  # type: ignore[type-var]
    expected = sorted(bridge.places)
    if found != expected:
        raise ModelError(
            f"the model has attention in layers {found}, its configuration says {expected}: "
            "models of this kind cannot be served yet"
        )
    for module in layers:
        setattr(module, _BRIDGE, bridge)


def _attends(module: torch.nn.Module) -> bool:
    """Whether it may call the attention interface, which looks at these in the module."""
    return isinstance(getattr(module, "layer_idx", None), int) and any(
        hasattr(module, name) for name in ("is_causal", "num_key_value_groups", "k_proj")
    )
