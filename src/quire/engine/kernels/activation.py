"""The middle of an MLP: act(gate) · up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _activate(both, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(both + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        act = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh z) = sigmoid 2z
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        act = gate * tl.sigmoid(2.0 * z)
    tl.store(out + row * size + at, (act * up).to(out.dtype.element_ty), mask=inside)


def activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[rows, gate | up], contiguous → [rows, size]. `activation`: as configurations call it."""
    assert gate_up.is_contiguous()
    assert activation in ("silu", "gelu", "gelu_pytorch_tanh")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, size))
    if rows:
        grid = (rows, triton.cdiv(size, _BLOCK))
        _activate[grid](gate_up, out, size, KIND=activation, BLOCK=_BLOCK)
    return out
