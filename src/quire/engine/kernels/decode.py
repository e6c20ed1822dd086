"""Attention of single queries over the pages of their sequences, split over the length.

    key block    0 ······ begin ········ ······· end      blocks of BN tokens that the query sees
    split                 [ 0 )[ 1 )[ 2 ) ··· [ S )       each a program of its own

A program has one sequence, one kv head with all its queries (padded to the rows that a matrix unit
wants) and one split. With several splits a second kernel puts them together. Keys and values
beyond a sequence's length, and before its window, are not read: whatever is there does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_PROGRAMS = 264
"""So many fill the machine: two for each multiprocessor of the GPUs this was measured on."""
_MAX_SPLITS = 64
_LOG2_E = 1.4426950408889634
_NEVER: tl.constexpr = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class Tables:
    """Sequences to decode, all int32 on the device."""

    rows: torch.Tensor
    """[sequences]: where each one's query is, and its output goes."""
    lengths: torch.Tensor
    """[sequences]: tokens in its pages, the query's own included; 0: none, and the output is 0."""
    firsts: torch.Tensor
    """[sequences]: where its page numbers begin in `pages`."""
    pages: torch.Tensor


@triton.jit
def _finish(acc, m, total, sinks, heads, is_head, HAS_SINKS: tl.constexpr):
    """What the sums of a softmax come to. In powers of two; a sink is a score without a value."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - top)[:, None]
        total = total * tl.exp2(m - top) + tl.exp2(sink - top)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _decode(
    query, keys, values, rows, lengths, firsts, pages, sinks, out, part, part_m, part_l,
    scale, window, query_row, query_head,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    length = tl.load(lengths + b)
    seen_from = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(length - window, 0)
    begin = seen_from // BN
    end = (length + BN - 1) // BN
    per = (end - begin + S - 1) // S
    low = begin + s * per
    high = tl.minimum(low + per, end)
    table = pages + tl.load(firsts + b)
    row = tl.load(rows + b).to(tl.int64)

    g = tl.arange(0, BG)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    heads = h * G + g
    is_head = g < G
    is_query = is_head[:, None] & (d < D)[None, :]
    place = query + row * query_row + heads[:, None] * query_head + d[None, :]
    q = tl.load(place, mask=is_query, other=0.0)
    m = tl.full([BG], _NEVER, tl.float32)
    total = tl.zeros([BG], tl.float32)
    acc = tl.zeros([BG, BD], tl.float32)
    for i in range(low, high):
        t = i * BN + n
        seen = t < length
        if HAS_WINDOW:
            seen = seen & (t >= seen_from)
        if P % BN == 0:
            page = tl.load(table + (i * BN) // P).to(tl.int64)
            slot = page * P + (i * BN) % P + n
        else:
            page = tl.load(table + t // P, mask=seen, other=0).to(tl.int64)
            slot = page * P + t % P
        at = (slot * (KV * D) + h * D)[:, None] + d[None, :]
        read = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=read, other=0.0)
        v = tl.load(values + at, mask=read, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        x = tl.where(seen[None, :], x, _NEVER)
        top = tl.maximum(m, tl.max(x, 1))
        shrink = tl.exp2(m - top)
        p = tl.exp2(x - top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = top
    if S == 1:
        attended = _finish(acc, m, total, sinks, heads, is_head, HAS_SINKS)
        place = out + (row * H + heads[:, None]) * D + d[None, :]
        tl.store(place, attended.to(out.dtype.element_ty), mask=is_query)
    else:
        base = (b * S + s) * H + heads
        tl.store(part + base[:, None] * D + d[None, :], acc, mask=is_query)
        tl.store(part_m + base, m, mask=is_head)
        tl.store(part_l + base, total, mask=is_head)


@triton.jit
def _reduce(
    part, part_m, part_l, rows, sinks, out,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.load(rows + b).to(tl.int64)
    d = tl.arange(0, BD)
    base = (b * S + tl.arange(0, S)) * H + h
    m = tl.load(part_m + base)
    top = tl.max(m, 0)
    weights = tl.exp2(m - top)
    total = tl.sum(tl.load(part_l + base) * weights, 0)
    read = (d < D)[None, :]
    parts = tl.load(part + base[:, None] * D + d[None, :], mask=read, other=0.0)
    acc = tl.sum(parts * weights[:, None], 0)
    if HAS_SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * 1.4426950408889634
        both = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - both)
        total = total * tl.exp2(top - both) + tl.exp2(sink - both)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (row * H + h) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def num_splits(num_sequences: int, num_kv_heads: int) -> int:
    """As many as fill the machine: a power of two."""
    splits = 1
    while splits * num_sequences * num_kv_heads < _PROGRAMS and splits < _MAX_SPLITS:
        splits *= 2
    return splits


def decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    out: torch.Tensor,
    *,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """`query` [heads, row, dim]; `keys` and `values`: a layer's pages, [pages, page_size, kv heads,
    dim], contiguous; into `out` [row, heads, dim], contiguous. `window`: tokens that a query sees,
    its own included; 0: all. `sinks` [heads]."""
    num_heads, _, dim = query.shape
    page_size, kv = keys.shape[1], keys.shape[2]
    assert query.stride(2) == 1
    assert out.is_contiguous()
    count = len(tables.lengths)
    splits = num_splits(count, kv)
    part = part_m = part_l = out
    if splits > 1:
        part = query.new_empty((count, splits, num_heads, dim), dtype=torch.float32)
        part_m, part_l = part.new_empty((2, count, splits, num_heads)).unbind()
    block_dim = max(16, triton.next_power_of_2(dim))
    common = {"H": num_heads, "D": dim, "BD": block_dim, "S": splits}
    has_sinks = sinks is not None
    some_sinks = out if sinks is None else sinks
    _decode[(count, kv, splits)](
        query,
        keys,
        values,
        tables.rows,
        tables.lengths,
        tables.firsts,
        tables.pages,
        some_sinks,
        out,
        part,
        part_m,
        part_l,
        scaling * _LOG2_E,
        window,
        query.stride(1),
        query.stride(0),
        KV=kv,
        G=num_heads // kv,
        BG=max(16, triton.next_power_of_2(num_heads // kv)),
        P=page_size,
        BN=_block(block_dim * query.element_size()),
        HAS_WINDOW=window > 0,
        HAS_SINKS=has_sinks,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
        **common,
    )
    if splits > 1:
        _reduce[(count, num_heads)](
            part, part_m, part_l, tables.rows, some_sinks, out,
            HAS_SINKS=has_sinks, num_warps=1, **common,
        )  # fmt: skip


def _block(head_bytes: int) -> int:
    """Tokens at a time: keys and values of three blocks are in shared memory at once."""
    return 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
