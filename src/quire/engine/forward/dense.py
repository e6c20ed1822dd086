"""DenseForward: a decoder of our own, for the families that spec.py knows.

Computes a batch as one packed row, the same on CPU and CUDA. After the last attention only the
tokens whose logits are wanted go on. Norms, positions and activations are rounded where
transformers' modules round them, so that in any dtype the two differ by the order of sums only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from quire.engine.batch import Batch
from quire.engine.bridge import AttentionBridge
from quire.engine.forward.base import row_ends
from quire.engine.forward.rope import Turn, Turner, turned
from quire.engine.forward.spec import DenseSpec, dense_refusal, dense_spec
from quire.engine.forward.weights import (
    DenseWeights,
    LayerWeights,
    Linear,
    Part,
    load_weights,
    weights_refusal,
)
from quire.engine.parallel import AllReduce
from quire.models import describe, read_config
from quire.models.weights import stored_tensors
from quire.types import OperationId


@dataclass(frozen=True, slots=True)
class DenseModel:
    """One rank's share of a model."""

    spec: DenseSpec
    weights: DenseWeights


def why_not_dense(directory: Path) -> str | None:
    """None: `load_dense` reads the model there. Raises ModelError if it is none at all."""
    text: Any = read_config(directory).get_text_config()
    shape = describe(directory)
    if reason := dense_refusal(text, shape):
        return reason
    return weights_refusal(dense_spec(text, shape), stored_tensors(directory))


def load_dense(
    directory: Path, *, dtype: torch.dtype, device: torch.device, rank: int = 0, num_ranks: int = 1
) -> DenseModel:
    """Of a directory that `why_not_dense` has nothing against. Raises ModelError."""
    spec = dense_spec(read_config(directory).get_text_config(), describe(directory))
    weights = load_weights(
        spec,
        stored_tensors(directory),
        Part.of(spec, rank, num_ranks),
        dtype=dtype,
        device=device,
    )
    return DenseModel(spec, weights)


class DenseForward:
    def __init__(
        self, model: DenseModel, bridge: AttentionBridge, all_reduce: AllReduce | None = None
    ) -> None:
        """`all_reduce` adds up over ranks; None: there is only one."""
        self._spec = model.spec
        self._weights = model.weights
        self._bridge = bridge
        self._all_reduce = all_reduce
        dtype, device = model.weights.embedding.dtype, model.weights.embedding.device
        self._turner = Turner(model.spec.ropes, dtype=dtype, device=device)
        # transformers rounds it to the model's dtype before it multiplies.
        self._embedding_scale = float(torch.tensor(model.spec.embedding_scale).to(dtype))
        self._num_kv_heads = _num_kv_heads(model)

    @property
    def failed(self) -> Mapping[OperationId, str]:
        return self._bridge.failed

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        spec, weights = self._spec, self._weights
        device = weights.embedding.device
        self._bridge.forget()
        tokens, positions = (row.to(device) for row in self._bridge.begin(batch, drawn))
        hidden = functional.embedding(tokens, weights.embedding)
        if spec.embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        turns = self._turner.turns(positions)
        ends = row_ends(batch)
        for number, layer in enumerate(weights.layers):
            attended = self._attend(number, layer, hidden, turns[number])
            if number == spec.num_layers - 1:
                if not ends:
                    return hidden.new_empty((0, spec.vocab_size))
                if len(ends) < len(hidden):
                    hidden, attended = hidden[ends], attended[ends]
            hidden = self._added(hidden, attended, layer.o, layer.attention_post_norm)
            inner = self._mlp(layer, hidden)
            hidden = self._added(hidden, inner, layer.down, layer.mlp_post_norm)
        logits = functional.linear(self._normed(hidden, weights.norm), weights.head)
        if spec.logit_cap is not None:
            logits = torch.tanh(logits / spec.logit_cap) * spec.logit_cap
        return logits

    def _attend(
        self, number: int, layer: LayerWeights, hidden: torch.Tensor, by: Turn
    ) -> torch.Tensor:
        """[row, hidden] → [row, query heads × dim]"""
        spec, kv_heads = self._spec, self._num_kv_heads
        normed = self._normed(hidden, layer.attention_norm)
        heads = _linear(normed, layer.qkv).view(len(hidden), -1, spec.head_dim)
        queries_and_keys, values = heads[:, :-kv_heads], heads[:, -kv_heads:]
        if layer.qk_norm is not None:
            queries_and_keys = self._normed(queries_and_keys, layer.qk_norm)
        queries_and_keys = turned(queries_and_keys, by).transpose(0, 1)
        attended = self._bridge.attend(
            number,
            queries_and_keys[:-kv_heads],
            queries_and_keys[-kv_heads:],
            values.transpose(0, 1),
            scaling=spec.scaling,
            window=spec.windows[number],
            sinks=None,
        )
        return attended.flatten(1)

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        """[row, hidden] → [row, this rank's part of the MLP]"""
        gate, up = _linear(self._normed(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return _activated(gate, self._spec.activation).mul_(up)

    def _added(
        self,
        hidden: torch.Tensor,
        inner: torch.Tensor,
        linear: Linear,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """`hidden`, and what all ranks' parts of `inner` come to."""
        output = _linear(inner, linear)
        if self._all_reduce is not None:
            self._all_reduce(output)
        return (output if norm is None else self._normed(output, norm)).add_(hidden)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension, in float32; the weight in its own dtype."""
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._spec.norm_eps)
        return (wide * inverse).to(weight.dtype).mul_(weight).to(x.dtype)


def _num_kv_heads(model: DenseModel) -> int:
    """Of this rank: heads of queries, keys and values lie in one matrix."""
    spec = model.spec
    group = spec.num_q_heads // spec.num_kv_heads
    return model.weights.layers[0].qkv.weight.shape[0] // spec.head_dim // (group + 2)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation != "gelu" else "none")
