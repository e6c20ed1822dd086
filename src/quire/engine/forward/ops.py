"""What a decoder does between its matrices: norms, positions, activations. In torch, on any device.

TorchOps rounds where transformers' modules round, so that in any dtype the two differ by the order
of sums only. fused.py has the same in fewer kernels, for CUDA.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from quire.engine.attention import Heads, Target
from quire.engine.forward.rope import Rotation, turned
from quire.engine.forward.spec import DenseSpec


class Ops(Protocol):
    """Norm weights are [size], in the model's dtype, or in float32 if an offset is in them."""

    def prepared(self, by: Rotation, dtype: torch.dtype) -> Rotation:
        """As `heads` wants it."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of each row of [row, size]."""

    def add_norm(
        self,
        output: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        post: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden` and `output` together (normed by `post` before, if given), and the norm of that.
        May write into both."""

    def heads(
        self, qkv: torch.Tensor, norms: torch.Tensor | None, by: Rotation, target: Target | None
    ) -> Heads:
        """`qkv` [row, heads × dim] with positions worked in, and `norms` [heads of queries and of
        keys, dim] before; keys and values are then in `target`, if there is one."""

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[row, gate | up] → [row, size]"""


class TorchOps:
    def __init__(self, spec: DenseSpec, num_kv_heads: int) -> None:
        """`num_kv_heads`: of this rank."""
        self._spec = spec
        self._num_kv_heads = num_kv_heads

    def prepared(self, by: Rotation, dtype: torch.dtype) -> Rotation:
        return by.widened(dtype)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._spec.norm_eps)
        return (wide * inverse).to(weight.dtype).mul_(weight).to(x.dtype)

    def add_norm(
        self,
        output: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        post: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        added = (output if post is None else self.norm(output, post)).add_(hidden)
        return added, self.norm(added, weight)

    def heads(
        self, qkv: torch.Tensor, norms: torch.Tensor | None, by: Rotation, target: Target | None
    ) -> Heads:
        assert target is None
        kv = self._num_kv_heads
        heads = qkv.view(len(qkv), -1, self._spec.head_dim)
        queries_and_keys, values = heads[:, :-kv], heads[:, -kv:]
        if norms is not None:
            queries_and_keys = self.norm(queries_and_keys, norms)
        queries_and_keys = turned(queries_and_keys, by).transpose(0, 1)
        return Heads(queries_and_keys[:-kv], queries_and_keys[-kv:], values.transpose(0, 1))

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        if self._spec.activation == "silu":
            return functional.silu(gate).mul_(up)
        approximate = "none" if self._spec.activation == "gelu" else "tanh"
        return functional.gelu(gate, approximate=approximate).mul_(up)
