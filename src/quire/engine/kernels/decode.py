"""Attention of few queries over the pages of their sequences, split over the length.

    key block    0 ······ begin ········ ······· end      blocks of BN tokens that the queries see
    split                 [ 0 )[ 1 )[ 2 )[ )              each a program of its own

A program has one sequence, a tile of its queries, one kv head with all its query heads, and one
split. Rows of its tile: query j and query head g are row j · BG + g, where BG is the heads of a
group, padded. All sequences are split at the same length, so that a long one among short ones is
read by many; a sequence that fits into one split is done, and a second kernel puts the others
together. Keys and values beyond a sequence's length, and before its window, are not read: whatever
is there does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_PROGRAMS = 528
"""So many fill the machine: four for each multiprocessor of the GPUs this was measured on."""
_MAX_PROGRAMS = 4096
"""So many are launched at most, if sequences are many; those with nothing to do end at once."""
_MAX_SPLITS = 64
_GRAIN = 64
"""Tokens: splits are as long, or a multiple of it."""
_ALIKE = 16
"""Sequences are of about the same length, if less than such a part of the longest is missing."""
_MIN_ROWS, _MAX_ROWS, _MAX_LARGE_ROWS = 16, 64, 128
"""Of a tile: a matrix unit wants no fewer. Keys and values are read once for each tile, so larger
ones are faster for as long as two of them fit on a multiprocessor: one computes while the other
weighs. That takes half precision, heads of up to 128 numbers, and registers that are kept short."""
_LARGE_DIM, _LARGE_REGISTERS = 128, 128
_STAGES, _FEW_STAGES = 3, 2
"""Blocks that are on their way at once. Large tiles have no room for a third one, and are faster
without the attempt where a block lies in one page. Single queries have little to do with a block:
the room is better used by more programs."""
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_NEVER: tl.constexpr = tl.constexpr(-1.0e30)


@dataclass(frozen=True, slots=True)
class Tables:
    """Sequences and their last queries, all int32 on the device."""

    rows: torch.Tensor
    """[sequences]: where each one's first query is, and its output goes; the others follow it."""
    counts: torch.Tensor
    """[sequences]: how many queries it has."""
    lengths: torch.Tensor
    """[sequences]: tokens in its pages, the queries' own included; 0: none, and the output is 0."""
    firsts: torch.Tensor
    """[sequences]: where its page numbers begin in `pages`."""
    pages: torch.Tensor
    split: torch.Tensor
    """[1]: after how many tokens a sequence is split, a multiple of 64; see `split_tokens`."""
    max_splits: int
    """What is left after so many less one is not split again; see `num_splits`."""
    max_count: int = 1
    """At least the largest of `counts`."""


@triton.jit
def _see(
    i, q, m, total, acc, keys, values, table, position, length, seen_from, window, scale, h,
    KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys more. `m`, `total`, `acc`: the largest score, scaled, sum of weights, and
    weighted values so far. `scale` is positive. Masks are a third of the work: where all is seen
    there are none."""
    n = tl.arange(0, BN)
    d = tl.arange(0, BD)
    t = i * BN + n
    there = t < length
    if HAS_WINDOW:
        there = there & (t >= seen_from)
    if P % BN == 0:
        page = tl.load(table + (i * BN) // P).to(tl.int64)
        slot = page * P + (i * BN) % P + n
    elif IS_MASKED:
        page = tl.load(table + t // P, mask=there, other=0).to(tl.int64)
        slot = page * P + t % P
    else:
        page = tl.load(table + t // P).to(tl.int64)
        slot = page * P + t % P
    at = (slot * (KV * D) + h * D)[:, None] + d[None, :]
    if IS_MASKED or D != BD:
        read = (d < D)[None, :]
        if IS_MASKED:
            read = there[:, None] & read
        k = tl.load(keys + at, mask=read, other=0.0)
        v = tl.load(values + at, mask=read, other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    seen = there[None, :] & (t[None, :] <= position[:, None])
    if HAS_WINDOW:
        seen = seen & (t[None, :] > position[:, None] - window)
    if IS_MASKED:
        x = tl.where(seen, x, _NEVER)
    top = tl.maximum(m, tl.max(x, 1) * scale)
    p = tl.exp2(x * scale - top[:, None])
    if IS_MASKED:
        p = tl.where(seen, p, 0.0)
    shrink = tl.exp2(m - top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return top, total, acc


@triton.jit
def _decode(
    query, keys, values, rows, counts, lengths, firsts, pages, split, sinks, out,
    part, part_m, part_l,
    scale, window, query_row, query_head, tiles,
    QUERIES: tl.constexpr, ROWS: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_PLAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`HAS_PLAIN`: blocks that every query sees whole have a loop of their own, without masks. It
    pays where queries are several: a single one is done before a second loop has begun."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    s = tl.program_id(2)
    b = tile // tiles
    first_query = (tile % tiles) * QUERIES
    count = tl.load(counts + b)
    before = tl.load(lengths + b) - count  # tokens before the sequence's first query
    length = before + tl.minimum(first_query + QUERIES, count)  # that some query here sees
    length = tl.where(first_query < count, length, 0)
    seen_from = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(before + first_query + 1 - window, 0)
    begin = seen_from // BN
    end = (length + BN - 1) // BN
    per = tl.load(split) // BN
    low = begin + s * per
    high = tl.where(s < S - 1, tl.minimum(low + per, end), end)
    table = pages + tl.load(firsts + b)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, BD)
    j = first_query + r // BG
    heads = h * G + r % BG
    is_row = (r % BG < G) & (r // BG < QUERIES) & (j < count)
    position = before + j
    is_query = is_row[:, None] & (d < D)[None, :]
    row = tl.load(rows + b).to(tl.int64) + j
    place = query + (row * query_row + heads * query_head)[:, None] + d[None, :]
    q = tl.load(place, mask=is_query, other=0.0)
    m = tl.full([ROWS], _NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BD], tl.float32)
    plain = low
    if HAS_PLAIN:  # every query sees all of the blocks before this one
        plain = tl.maximum(low, tl.minimum(high, (before + first_query + 1) // BN))
        for i in range(low, plain):
            m, total, acc = _see(
                i, q, m, total, acc, keys, values, table, position, length, seen_from, window,
                scale, h, KV, D, BD, P, BN, False, HAS_WINDOW, PRECISION,
            )  # fmt: skip
    for i in tl.range(plain, high, num_stages=1 if HAS_PLAIN else None):
        m, total, acc = _see(
            i, q, m, total, acc, keys, values, table, position, length, seen_from, window,
            scale, h, KV, D, BD, P, BN, True, HAS_WINDOW, PRECISION,
        )  # fmt: skip
    is_whole = s == 0
    if S > 1:
        is_whole = is_whole & (end - begin <= per)
        is_part = (low < high) & (end - begin > per)
        base = ((tile * KV + h) * S + s) * ROWS + r
        tl.store(part + base[:, None] * D + d[None, :], acc, mask=is_query & is_part)
        tl.store(part_m + base, m, mask=is_row & is_part)
        tl.store(part_l + base, total, mask=is_row & is_part)
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        top = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - top)[:, None]
        total = total * tl.exp2(m - top) + tl.exp2(sink - top)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + ((row * H + heads) * D)[:, None] + d[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=is_query & is_whole)


@triton.jit
def _reduce(
    part, part_m, part_l, rows, counts, lengths, split, sinks, out, max_count, tiles, window,
    QUERIES: tl.constexpr, ROWS: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, G: tl.constexpr, BG: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, S: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One query head of one query; the same blocks and splits as in `_decode`."""
    b = tl.program_id(0) // max_count
    j = tl.program_id(0) % max_count
    h = tl.program_id(1)
    count = tl.load(counts + b)
    before = tl.load(lengths + b) - count
    first_query = j // QUERIES * QUERIES
    length = before + tl.minimum(first_query + QUERIES, count)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(before + first_query + 1 - window, 0) // BN
    num_blocks = (length + BN - 1) // BN - begin
    per = tl.load(split) // BN
    if (j < count) & (num_blocks > per):
        row = tl.load(rows + b).to(tl.int64) + j
        tile = b * tiles + j // QUERIES
        r = (j % QUERIES) * BG + h % G
        d = tl.arange(0, BD)
        s = tl.arange(0, S)
        is_part = s * per < num_blocks
        base = ((tile * KV + h // G) * S + s) * ROWS + r
        m = tl.load(part_m + base, mask=is_part, other=_NEVER)
        top = tl.max(m, 0)
        weights = tl.exp2(m - top)
        total = tl.sum(tl.load(part_l + base, mask=is_part, other=0.0) * weights, 0)
        read = is_part[:, None] & (d < D)[None, :]
        parts = tl.load(part + base[:, None] * D + d[None, :], mask=read, other=0.0)
        acc = tl.sum(parts * weights[:, None], 0)
        if HAS_SINKS:
            sink = tl.load(sinks + h).to(tl.float32) * _LOG2_E
            both = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - both)
            total = total * tl.exp2(top - both) + tl.exp2(sink - both)
        acc = acc / tl.where(total == 0.0, 1.0, total)
        tl.store(out + (row * H + h) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def num_splits(num_tiles: int, num_kv_heads: int) -> int:
    """Of one tile, at most, if there are so many: a power of two."""
    splits = 1
    while 2 * splits * num_tiles * num_kv_heads <= _MAX_PROGRAMS and splits < _MAX_SPLITS:
        splits *= 2
    return splits


def fills(num_tiles: int, num_kv_heads: int) -> bool:
    """Whether so many, each unsplit, are work for the whole machine."""
    return 2 * num_tiles * num_kv_heads >= _PROGRAMS


def split_tokens(
    lengths: npt.NDArray[np.int32], window: int, *, max_splits: int, num_kv_heads: int
) -> int:
    """After how many tokens sequences of these lengths are split, so that all of them together
    fill the machine."""
    # A window begins and ends anywhere in a block.
    seen = np.minimum(lengths, window + 2 * _GRAIN) if window else lengths
    blocks = -(-seen // _GRAIN)
    longest = max(1, int(blocks.max()))
    each = -(-int(blocks.sum()) * num_kv_heads // _PROGRAMS)
    if longest <= each + each // 4:  # a short rest is not worth a split of its own
        each = longest
    splits = _PROGRAMS // (len(blocks) * num_kv_heads)
    if splits > 1 and longest - int(blocks.min()) <= longest // _ALIKE:
        each = -(-longest // splits)  # none may be left for when all the others are done
    return max(1, each, -(-longest // max_splits)) * _GRAIN


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
    block_dim = max(16, triton.next_power_of_2(dim))
    group = triton.next_power_of_2(num_heads // kv)
    takes_large = query.element_size() == 2 and block_dim <= _LARGE_DIM
    most = _MAX_LARGE_ROWS if takes_large and _has_large(query.device) else _MAX_ROWS
    queries = max(1, min(triton.next_power_of_2(tables.max_count), most // group))
    num_rows = max(_MIN_ROWS, queries * group)
    tiles = triton.cdiv(tables.max_count, queries)
    num_sequences = len(tables.lengths)
    splits = tables.max_splits
    part = part_m = part_l = out
    if splits > 1:
        shape = (num_sequences * tiles, kv, splits, num_rows)
        part = query.new_empty((*shape, dim), dtype=torch.float32)
        part_m, part_l = part.new_empty((2, *shape)).unbind()
    is_large, is_single = num_rows > _MAX_ROWS, tables.max_count == 1
    block = _block(block_dim * query.element_size())
    shapes = {
        "QUERIES": queries, "ROWS": num_rows, "H": num_heads, "KV": kv,
        "G": num_heads // kv, "BG": group, "D": dim, "BD": block_dim, "S": splits,
        "BN": block,
        "HAS_WINDOW": window > 0, "HAS_SINKS": sinks is not None,
    }  # fmt: skip
    some_sinks = out if sinks is None else sinks
    _decode[(num_sequences * tiles, kv, splits)](
        query,
        keys,
        values,
        tables.rows,
        tables.counts,
        tables.lengths,
        tables.firsts,
        tables.pages,
        tables.split,
        some_sinks,
        out,
        part,
        part_m,
        part_l,
        scaling * _LOG2_E.value,
        window,
        query.stride(1),
        query.stride(0),
        tiles,
        P=page_size,
        HAS_PLAIN=not window and not is_single,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        num_warps=8 if is_large or num_rows * block_dim > 8192 else 4,
        num_stages=_FEW_STAGES if is_single or (is_large and page_size % block == 0) else _STAGES,
        maxnreg=_LARGE_REGISTERS if is_large else None,
        **shapes,
    )
    if splits > 1:
        _reduce[(num_sequences * tables.max_count, num_heads)](
            part, part_m, part_l, tables.rows, tables.counts, tables.lengths, tables.split,
            some_sinks, out, tables.max_count, tiles, window,
            num_warps=4 if splits * block_dim > 2048 else 1, **shapes,
        )  # fmt: skip


@cache
def _has_large(device: torch.device) -> bool:
    """Large tiles multiply from shared memory: before Hopper they would need more registers."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)


def _block(head_bytes: int) -> int:
    """Tokens at a time: keys and values of three blocks are in shared memory at once."""
    return 64 if head_bytes <= 256 else 32 if head_bytes <= 512 else 16
