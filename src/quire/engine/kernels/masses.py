"""Where in a row its mass is: the likeliest token, and the mass down to some edges below it.

The first of two steps of a draw (see sampling.py), by NUM_PARTS programs per row, so that a small
batch keeps the device as busy as a large one. Edges are logits; the last one is the lowest:

    peak ─ 0 ─ 1 ─ 2 ─ … ─ 14 ─ (16 temperatures below, or the lowest) ─────── 15
    [ masses[0]  )
    [ masses[14]                                                     )
    [ masses[15]: all                                                              ]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import (
    BLOCK,
    LAST_KEY,
    NUM_PARTS,
    TEMPERATURE,
    WARPS,
    key_of,
    read,
    row_pointers,
    value_of,
    weight_of,
)

NUM_EDGES = tl.constexpr(16)
_REACH = tl.constexpr(16.0)
_PARTS = tl.constexpr(NUM_PARTS)
_WEIGH_BLOCK = 512
_WEIGH_WARPS = 8


class Masses(NamedTuple):
    """By row and part; whoever reads them adds them up, with `peak_of` and `sums_of`."""

    firsts: torch.Tensor
    """int64: the first key."""
    lows: torch.Tensor
    """float32: the lowest finite logit; NaN: some are no numbers."""
    masses: torch.Tensor
    """float64 [rows, parts, edges]: of the tokens down to each edge."""
    counts: torch.Tensor
    """float64: their number, if any row asked."""


@triton.jit(do_not_specialize=["rows"])
def _survey(raw, stride, adjusted, columns, firsts, lows, rows, vocab, size, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
    lane = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], LAST_KEY, tl.int64)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(part * size, tl.minimum((part + 1) * size, vocab), BLOCK):
        token = start + lane
        inside = token < vocab
        x = read(raw, adjusted, edited, token, inside)
        strange |= (inside & (x != x)).to(tl.int32)  # noqa: PLR0124
        first = tl.where(inside, tl.minimum(first, key_of(x, token)), first)
        lowest = tl.where(inside & (x > float("-inf")), tl.minimum(lowest, x), lowest)
    low = tl.where(tl.max(strange, 0) == 0, tl.min(lowest, 0), float("nan"))
    tl.store(firsts + row * _PARTS + part, tl.min(first, 0))
    tl.store(lows + row * _PARTS + part, low)


@triton.jit
def peak_of(firsts, lows, row):
    """First key and lowest finite logit of a row, and whether it can be drawn from."""
    part = row * _PARTS + tl.arange(0, _PARTS)
    first = tl.min(tl.load(firsts + part), 0)
    low = tl.load(lows + part)
    strange = tl.max((low != low).to(tl.int32), 0)  # noqa: PLR0124
    peak = value_of(first >> 32)
    return first, tl.min(low, 0), (strange == 0) & (peak < float("inf")) & (peak > float("-inf"))


@triton.jit
def edge_of(number, peak, lowest, temperature):
    """float32; falls as the number rises. `peak` is float64."""
    span = tl.minimum(peak - lowest.to(tl.float64), _REACH * temperature)
    value = (peak - span * ((number + 1) * (1.0 / NUM_EDGES))).to(tl.float32)
    return tl.where(number == NUM_EDGES - 1, lowest, value)


@triton.jit
def sums_of(partial, row):
    part = tl.arange(0, _PARTS)[:, None] * NUM_EDGES
    edge = tl.arange(0, NUM_EDGES)[None, :]
    return tl.sum(tl.load(partial + row * (_PARTS * NUM_EDGES) + part + edge), 0)


@triton.jit
def repeat(value):
    """Once for each edge."""
    values = ()
    for _ in tl.static_range(NUM_EDGES):
        values = values + (value,)
    return values


@triton.jit
def _add(sums, amount, x, peak, lowest, temperature):
    """To the sum of each edge above which, or at which, the logit is."""
    more = ()
    for j in tl.static_range(NUM_EDGES):
        before = x >= edge_of(j, peak, lowest, temperature)
        more = more + (sums[j] + tl.where(before, amount, 0),)
    return more


@triton.jit(do_not_specialize=["rows"])
def _weigh(
    raw, stride, adjusted, columns, firsts, lows, masses, counts, rows, vocab, size,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(columns + TEMPERATURE * rows + row)
    first, lowest, usable = peak_of(firsts, lows, row)
    if usable & (temperature > 0.0):
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        peak = value_of(first >> 32).to(tl.float64)
        lane = tl.arange(0, BLOCK)
        sums = repeat(tl.zeros([BLOCK], tl.float64))
        numbers = repeat(tl.zeros([BLOCK], tl.int32))
        for start in range(part * size, tl.minimum((part + 1) * size, vocab), BLOCK):
            token = start + lane
            inside = token < vocab
            x = read(raw, adjusted, edited, token, inside)
            weight = tl.where(inside, weight_of(x, peak, 1.0 / temperature), 0.0)
            sums = _add(sums, weight, x, peak, lowest, temperature)
            if COUNTS:
                counted = (weight > 0.0).to(tl.int32)
                numbers = _add(numbers, counted, x, peak, lowest, temperature)
        at = (row * _PARTS + part) * NUM_EDGES
        for j in tl.static_range(NUM_EDGES):
            tl.store(masses + at + j, tl.sum(sums[j], 0))
            if COUNTS:
                tl.store(counts + at + j, tl.sum(numbers[j], 0).to(tl.float64))


def weigh(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    columns: torch.Tensor,
    *,
    draws: bool,
    counts: bool,
    block: int = BLOCK,
) -> Masses:
    """`draws`: some row is not greedy; `counts`: some row has a top_k."""
    rows, vocab = logits.shape
    device = logits.device
    sums = rows, NUM_PARTS, NUM_EDGES.value
    found = Masses(
        torch.empty(rows, NUM_PARTS, dtype=torch.int64, device=device),
        torch.empty(rows, NUM_PARTS, dtype=torch.float32, device=device),
        torch.empty(sums, dtype=torch.float64, device=device),
        torch.empty(sums, dtype=torch.float64, device=device),
    )
    size = triton.cdiv(vocab, NUM_PARTS * block) * block
    _survey[(rows, NUM_PARTS)](
        logits, logits.stride(0), adjusted, columns, found.firsts, found.lows, rows, vocab, size,
        block, num_warps=WARPS // 2,
    )  # fmt: skip
    if draws:
        weigh_block = min(block, _WEIGH_BLOCK)
        size = triton.cdiv(vocab, NUM_PARTS * weigh_block) * weigh_block
        _weigh[(rows, NUM_PARTS)](
            logits, logits.stride(0), adjusted, columns, *found, rows, vocab, size,
            weigh_block, counts, num_warps=_WEIGH_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return found
