"""EagleHead: one decoder layer that goes on from a target model's hidden states, EAGLE-3's way.

    features ─▶ fc ─▶ hidden ──┬─▶ norm ─┐
    next token ─▶ embedding ───│─▶ norm ─┴▶ q,k,v ─▶ attention ─▶ o ─▶ + ─▶ norm ─▶ MLP ─▶ + ─▶ out
                               └───────────────────────────────────────▲

    out ─▶ norm ─▶ LM head: the token after the next

`features` at position i are the target's hidden states of token i after three of its layers, side
by side; the next token is token i + 1. So what the layer keeps for position i belongs to the pair
(token i, token i + 1), and its logits there are about token i + 2. To go further than the target
has, `out` takes the place of `hidden` at the next position, with the token just proposed.

Knows what is computed. Where keys and values lie, and over which of them attention goes, is the
caller's; files are headweights.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from quire.engine.attention import Heads, Target
from quire.engine.forward.matrices import packed, product
from quire.engine.forward.ops import Ops, TorchOps
from quire.engine.forward.rope import Turner
from quire.engine.forward.spec import DenseSpec

NUM_FEATURES = 3
"""Layers of the target that are looked at: a low, a middle and a high one."""

Attend = Callable[[Heads], torch.Tensor]
"""Heads, each [heads, row, dim] → what the queries found, [row, query heads × dim]."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    decoder: DenseSpec
    """Of the head: one layer. `vocab_size` is the target's."""
    layers: tuple[int, int, int]
    """Of the target, from 0: whose outputs are the features."""
    draft_vocab_size: int
    """Tokens that can be proposed; `vocab_size` if all of them can."""


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """On one device, in one dtype."""

    embedding: torch.Tensor
    """[vocabulary, hidden]"""
    fc: torch.Tensor
    """[hidden, 3 × hidden]"""
    hidden_norm: torch.Tensor
    token_norm: torch.Tensor
    qkv: torch.Tensor
    """[heads of queries, keys, values × dim, token | hidden]"""
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    """[draft vocabulary, hidden]"""
    draft_tokens: torch.Tensor | None
    """[draft vocabulary], int64: which tokens of the target they are; None: they are the same."""

    def packed(self) -> EagleWeights:
        """For computing, and for nothing else."""
        names = ("fc", "qkv", "o", "gate_up", "down", "lm_head")
        return replace(self, **{name: packed(getattr(self, name)) for name in names})


class Step(NamedTuple):
    hidden: torch.Tensor
    """[row, hidden]: what the next position goes on from, if the target has no features of it."""
    normed: torch.Tensor
    """[row, hidden]: for `logits`."""


class EagleHead:
    def __init__(self, spec: EagleSpec, weights: EagleWeights, ops: Ops | None = None) -> None:
        """`ops`: None: torch's."""
        self.spec = spec
        self._weights = weights
        self._ops = ops or TorchOps(spec.decoder, spec.decoder.num_kv_heads)
        self._turner = Turner(spec.decoder.ropes, weights.fc.device)

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[row, 3 × hidden] → [row, hidden]"""
        return product(features, self._weights.fc)

    def step(
        self,
        hidden: torch.Tensor,
        next_tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        target: Target | None = None,
    ) -> Step:
        """One position further on each row. `hidden` [row, hidden] may be written into;
        `next_tokens` [row] are the target's, those after the rows' own; `positions` [row] are the
        rows' own. `target`: where keys and values go, for Ops that put them there."""
        weights, ops = self._weights, self._ops
        embedded = functional.embedding(next_tokens, weights.embedding)
        inputs = (
            ops.norm(embedded, weights.token_norm),
            ops.norm(hidden, weights.hidden_norm),
        )
        (turn,) = self._turner.turns(positions)
        qkv = product(torch.cat(inputs, -1), weights.qkv)
        heads = ops.heads(qkv, None, ops.prepared(turn, hidden.dtype), target)
        output = product(attend(heads), weights.o)
        hidden, normed = ops.add_norm(output, hidden, weights.mlp_norm, None)
        inner = ops.activated(product(normed, weights.gate_up))
        output = product(inner, weights.down)
        return Step(*ops.add_norm(output, hidden, weights.norm, None))

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[row, hidden] → [row, draft vocabulary]"""
        return product(normed, self._weights.lm_head)

    def likeliest(self, normed: torch.Tensor, count: int) -> torch.Tensor:
        """[row, hidden] → [row, count]: the target's tokens, the likeliest first."""
        logits = self.logits(normed)
        best = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices
        return self.proposed(best)

    def proposed(self, draft: torch.Tensor) -> torch.Tensor:
        """Tokens of the draft vocabulary, of any shape → the target's."""
        table = self._weights.draft_tokens
        return draft if table is None else table[draft]


def usual_layers(num_layers: int) -> tuple[int, int, int]:
    """Which layers' outputs published heads look at, unless they say."""
    return min(1, num_layers - 1), max(0, num_layers // 2 - 1), max(0, num_layers - 4)
