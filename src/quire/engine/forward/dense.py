"""DenseForward: a decoder of our own, for the families that spec.py knows.

Computes a batch as one packed row. After the last attention only the tokens whose logits are
wanted go on. Matrices are torch's everywhere; what lies between them is the business of `Ops`:
torch's operations, or fused kernels on CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from quire.engine.batch import Batch
from quire.engine.bridge import AttentionBridge, Inputs
from quire.engine.forward.dense_weights import (
    DenseWeights,
    LayerWeights,
    Linear,
    RankPart,
    load_weights,
    weights_refusal,
)
from quire.engine.forward.matrices import logits_of, product
from quire.engine.forward.ops import Ops, TorchOps
from quire.engine.forward.rope import Rotation, Turner
from quire.engine.forward.spec import DenseSpec, dense_refusal, dense_spec
from quire.engine.forward.taps import Taps
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
        RankPart.of(spec, rank, num_ranks),
        dtype=dtype,
        device=device,
    )
    return DenseModel(spec, weights)


class DenseForward:
    packs = True

    def __init__(
        self,
        model: DenseModel,
        bridge: AttentionBridge,
        all_reduce: AllReduce | None = None,
        ops: Ops | None = None,
        taps: Taps | None = None,
    ) -> None:
        """`all_reduce` adds up over ranks; None: there is only one. `ops`: None: torch's. `taps`:
        layers whose outputs are `features`."""
        self._spec = model.spec
        self._weights = model.weights
        self._bridge = bridge
        self._all_reduce = all_reduce
        self._ops = ops or TorchOps(model.spec, num_kv_heads(model))
        dtype, device = model.weights.embedding.dtype, model.weights.embedding.device
        self._turner = Turner(model.spec.ropes, device)
        self._taps = taps or Taps((), model.weights.embedding)
        # transformers rounds it to the model's dtype before it multiplies.
        self._embedding_scale = float(torch.tensor(model.spec.embedding_scale).to(dtype))

    @property
    def features(self) -> torch.Tensor:
        return self._taps.features

    @property
    def failed(self) -> Mapping[OperationId, str]:
        return self._bridge.failed

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        self._bridge.forget()
        return self.compute(self._bridge.begin(batch, drawn))

    def new_logits(self, num_rows: int) -> torch.Tensor:
        return self._weights.head.new_empty((num_rows, self._spec.vocab_size))

    def after_replay(self, num_tokens: int) -> None:
        self._taps.begin(num_tokens)

    def compute(self, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
        spec, weights, ops = self._spec, self._weights, self._ops
        hidden = functional.embedding(inputs.tokens, weights.embedding)
        if spec.embedding_scale != 1:
            hidden = hidden * self._embedding_scale
        turns = [ops.prepared(by, hidden.dtype) for by in self._turner.turns(inputs.positions)]
        norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        normed = ops.norm(hidden, weights.layers[0].attention_norm)
        ends, last = inputs.ends, spec.num_layers - 1
        self._taps.begin(len(hidden))
        for number, layer in enumerate(weights.layers):
            attended = self._attend(number, layer, normed, turns[self._turner.kind_of[number]])
            if ends is not None and number == last and last not in self._taps.layers:
                if not len(ends):
                    return hidden.new_empty((0, spec.vocab_size))
                hidden, attended = (x.index_select(0, ends) for x in (hidden, attended))
                ends = None
            output = self._summed(attended, layer.o)
            hidden, normed = ops.add_norm(output, hidden, layer.mlp_norm, layer.attention_post_norm)
            inner = ops.activated(_linear(normed, layer.gate_up))
            output = self._summed(inner, layer.down)
            hidden, normed = ops.add_norm(output, hidden, norms[number], layer.mlp_post_norm)
            if number in self._taps.layers:
                self._taps.take(number, hidden)
        if ends is not None:
            normed = normed.index_select(0, ends)
        logits = logits_of(normed, weights.head, out)
        if spec.logit_cap is not None:
            logits.div_(spec.logit_cap).tanh_().mul_(spec.logit_cap)
        return logits

    def _attend(
        self, number: int, layer: LayerWeights, normed: torch.Tensor, by: Rotation
    ) -> torch.Tensor:
        """[row, hidden] → [row, query heads × dim]"""
        target = self._bridge.target(number)
        heads = self._ops.heads(_linear(normed, layer.qkv), layer.qk_norm, by, target)
        attended = self._bridge.attend(
            number,
            heads,
            scaling=self._spec.scaling,
            window=self._spec.windows[number],
            sinks=None,
            is_appended=target is not None,
        )
        return attended.flatten(1)

    def _summed(self, inner: torch.Tensor, linear: Linear) -> torch.Tensor:
        """What all ranks' parts of `inner` come to."""
        output = _linear(inner, linear)
        if self._all_reduce is not None:
            self._all_reduce(output)
        return output


def num_kv_heads(model: DenseModel) -> int:
    """Of this rank: heads of queries, keys and values lie in one matrix."""
    spec = model.spec
    group = spec.num_q_heads // spec.num_kv_heads
    return model.weights.layers[0].qkv.weight.shape[0] // spec.head_dim // (group + 2)


def _linear(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    return product(x, linear.weight, linear.bias)
