"""RMS norm, with what comes before it in a decoder: the sum with the residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WARPS = 8


@triton.jit
def _add_norm(
    x, hidden, post, weight, normed, size, eps,
    BLOCK: tl.constexpr, HAS_POST: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    a = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_POST:
        scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
        a = a * scale * tl.load(post + at, mask=inside, other=0.0).to(tl.float32)
        a = a.to(x.dtype.element_ty).to(tl.float32)
    if ADDS:
        a += tl.load(hidden + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = a.to(hidden.dtype.element_ty)
        tl.store(hidden + row + at, rounded, mask=inside)
        a = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 0) / size + eps)
    a = a * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, a.to(normed.dtype.element_ty), mask=inside)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [rows, size], contiguous → the same, normed."""
    return _launch(x, None, None, weight, eps)


def add_norm(
    x: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    post: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden += x, in place; returns the norm of that. With `post`, x is normed by it before.

    Both are [rows, size], contiguous.
    """
    return _launch(x, hidden, post, weight, eps)


def _launch(
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    post: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    assert x.is_contiguous()
    assert hidden is None or (hidden.is_contiguous() and hidden.shape == x.shape)
    rows, size = x.shape
    normed = torch.empty_like(x)
    if rows:
        _add_norm[(rows,)](
            x,
            x if hidden is None else hidden,
            weight if post is None else post,
            weight,
            normed,
            size,
            eps,
            BLOCK=triton.next_power_of_2(size),
            HAS_POST=post is not None,
            ADDS=hidden is not None,
            num_warps=_WARPS,
        )
    return normed
