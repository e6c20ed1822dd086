"""FusedOps: what a decoder does between its matrices, in one kernel each.

In half precision these keep float32 from one matrix to the next and round once, where transformers'
modules round after every operation. In float32 the two differ by the order of sums only.
"""

from __future__ import annotations

import torch

from quire.engine.attention import Heads, Target
from quire.engine.forward.rope import Rotation
from quire.engine.forward.spec import DenseSpec
from quire.engine.kernels.activation import activate
from quire.engine.kernels.norm import add_norm, norm
from quire.engine.kernels.positions import turn


class FusedOps:
    def __init__(self, spec: DenseSpec, num_kv_heads: int) -> None:
        """`num_kv_heads`: of this rank."""
        self._spec = spec
        self._num_kv_heads = num_kv_heads

    def prepared(self, by: Rotation, dtype: torch.dtype) -> Rotation:
        return by

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return norm(x, weight, self._spec.norm_eps)

    def add_norm(
        self,
        output: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        post: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, add_norm(output, hidden, weight, self._spec.norm_eps, post)

    def heads(
        self, qkv: torch.Tensor, norms: torch.Tensor | None, by: Rotation, target: Target | None
    ) -> Heads:
        kv = self._num_kv_heads
        turn(
            qkv,
            by.cos,
            by.sin,
            num_kv_heads=kv,
            norms=norms,
            eps=self._spec.norm_eps,
            slots=None if target is None else target.slots,
            keys=None if target is None else target.keys,
            values=None if target is None else target.values,
        )
        heads = qkv.view(len(qkv), -1, self._spec.head_dim).transpose(0, 1)
        return Heads(heads[: -2 * kv], heads[-2 * kv : -kv], heads[-kv:])

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        return activate(gate_up, self._spec.activation)
