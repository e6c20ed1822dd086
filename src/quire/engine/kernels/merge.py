"""Attention over two sets of keys, from the attention over each: merged by log-sum-exp.

out = (out₁ · e^l₁ + out₂ · e^l₂) / (e^l₁ + e^l₂)        l = log Σ e^score
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048


@triton.jit
def _merge(
    one, one_l, two, two_l, one_head, one_row, two_head, two_row, one_l_head, two_l_head,
    H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    is_head = h < H
    l1 = tl.load(one_l + h * one_l_head + row, mask=is_head, other=0.0)
    l2 = tl.load(two_l + h * two_l_head + row, mask=is_head, other=0.0)
    top = tl.maximum(l1, l2)
    w1 = tl.exp(l1 - top)
    w2 = tl.exp(l2 - top)
    total = w1 + w2
    d = tl.arange(0, BD)[None, :]
    inside = is_head[:, None] & (d < D)
    at1 = one + h[:, None] * one_head + row * one_row + d
    at2 = two + h[:, None] * two_head + row * two_row + d
    a = tl.load(at1, mask=inside, other=0.0).to(tl.float32) * (w1 / total)[:, None]
    a += tl.load(at2, mask=inside, other=0.0).to(tl.float32) * (w2 / total)[:, None]
    tl.store(at1, a.to(one.dtype.element_ty), mask=inside)
    tl.store(one_l + h * one_l_head + row, top + tl.log(total), mask=is_head)


def merge(one: torch.Tensor, one_l: torch.Tensor, two: torch.Tensor, two_l: torch.Tensor) -> None:
    """Into `one`. Outputs [heads, row, dim], contiguous in dim; log-sum-exps [heads, row], float32,
    contiguous in rows."""
    heads, rows, dim = one.shape
    assert one.stride(2) == two.stride(2) == 1
    assert rows <= 1 or one_l.stride(1) == two_l.stride(1) == 1
    block_dim = triton.next_power_of_2(dim)
    block = min(triton.next_power_of_2(heads), max(1, _TILE // block_dim))
    if rows:
        _merge[(rows, triton.cdiv(heads, block))](
            one,
            one_l,
            two,
            two_l,
            one.stride(0),
            one.stride(1),
            two.stride(0),
            two.stride(1),
            one_l.stride(0),
            two_l.stride(0),
            H=heads,
            D=dim,
            BH=block,
            BD=block_dim,
        )
