"""What happens to heads between their matrix and attention: norms, positions, the way into pages.

row of qkv    [ queries ········ | keys ···· | values ·· )
in place       norm, turn         norm, turn
into pages                        ╰─ copied    ╰─ copied
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048
"""Elements of half a head, times heads, that one program turns when there are many rows."""
_MANY_ROWS = 256


@triton.jit
def _turn(
    qkv, norms, cos, sin, slots, keys, values, eps,
    H: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, BHALF: tl.constexpr, HAS_NORM: tl.constexpr, APPENDS: tl.constexpr,
):  # fmt: skip
    """One row's heads [program · BH, … + BH); every head as its two halves."""
    D: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    d = tl.arange(0, BHALF)[None, :]
    inside = (h < H + 2 * KV) & (d < HALF)
    turns = h < H + KV
    place = qkv + row * ((H + 2 * KV) * D) + h * D + d
    x1 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    y1, y2 = x1, x2
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]
        has = inside & turns
        y1 = x1 * scale * tl.load(norms + h * D + d, mask=has, other=0.0).to(tl.float32)
        y2 = x2 * scale * tl.load(norms + h * D + HALF + d, mask=has, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + row * HALF + d, mask=d < HALF, other=0.0)
    z1 = tl.where(turns, y1 * c - y2 * s, x1).to(qkv.dtype.element_ty)
    z2 = tl.where(turns, y2 * c + y1 * s, x2).to(qkv.dtype.element_ty)
    tl.store(place, z1, mask=inside & turns)
    tl.store(place + HALF, z2, mask=inside & turns)
    if APPENDS:
        slot = tl.load(slots + row).to(tl.int64)
        to = slot * (KV * D) + d
        is_key = inside & (h >= H) & turns & (slot >= 0)
        tl.store(keys + to + (h - H) * D, z1, mask=is_key)
        tl.store(keys + to + (h - H) * D + HALF, z2, mask=is_key)
        is_value = inside & (h >= H + KV) & (slot >= 0)
        tl.store(values + to + (h - H - KV) * D, z1, mask=is_value)
        tl.store(values + to + (h - H - KV) * D + HALF, z2, mask=is_value)


def turn(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_kv_heads: int,
    norms: torch.Tensor | None,
    eps: float,
    slots: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> None:
    """Norm and turn queries and keys, in place; with `slots`, put keys and values into pages.

    `qkv` [row, heads × dim], contiguous; `cos` and `sin` [row, dim / 2], float32; `norms` [heads of
    queries and of keys, dim]; `slots` [row], −1: nowhere; `keys` and `values`: a layer's pages,
    [pages, page_size, kv heads, dim], contiguous.
    """
    assert qkv.is_contiguous()
    rows, half = cos.shape
    num_heads = qkv.shape[1] // (2 * half)
    block_half = triton.next_power_of_2(half)
    block = triton.next_power_of_2(num_heads)
    block = min(block, max(1, _TILE // block_half) if rows >= _MANY_ROWS else 4)
    if rows:
        _turn[(rows, triton.cdiv(num_heads, block))](
            qkv,
            cos if norms is None else norms,
            cos,
            sin,
            cos if slots is None else slots,
            qkv if keys is None else keys,
            qkv if values is None else values,
            eps,
            H=num_heads - 2 * num_kv_heads,
            KV=num_kv_heads,
            HALF=half,
            BH=block,
            BHALF=block_half,
            HAS_NORM=norms is not None,
            APPENDS=slots is not None,
            num_warps=4 if rows >= _MANY_ROWS else 1,
        )
