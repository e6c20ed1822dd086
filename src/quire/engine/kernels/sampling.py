"""Drawing tokens: one program per row, which reads the row again and again and sorts nothing.

Every filter keeps the tokens up to some key (see rows.py), and the draw ends at one. Such a key is
found by bisection on the mass of what stands before it:

    peak ········ lo ····· pivot ····· hi ········ cut ········ last
    [   base    )  [  upper ]                                        masses of tokens
                     tokens in [lo, hi] are still in question

The pivot halves the interval of logits, then of ids among equals. Where the first interval ends is
told by mean and spread of the distances from the peak (Cantelli's inequality). Each lane of a
program looks after the tokens id = place · BLOCK + lane, and keeps a list of the places that are
still in question; so a pass costs what the longest list costs. With one token left per lane the
bisection goes on in registers. Masses are float64, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import (
    BLOCK,
    FARTHEST,
    FIRST_KEY,
    IDS,
    MIN_P,
    SLOT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    WARPS,
    code_of,
    key_of,
    moments,
    read,
    survey,
    value_of,
    weight_of,
)

_BY_COUNT = tl.constexpr(0)
_TO_SHARE = tl.constexpr(1)
_TO_DRAW = tl.constexpr(2)
"""Searches of a row, in this order: top_k, top_p, the draw."""


@triton.jit
def _pivot(lo, hi):
    """A key in [lo, hi): half of the logits between them, or of the ids if those are equal."""
    high, low = lo >> 32, hi >> 32
    middle = code_of(value_of(high) * 0.5 + value_of(low) * 0.5)
    middle = tl.minimum(tl.maximum(middle, high), low - 1)
    return tl.where(high == low, lo + ((hi - lo) >> 1), (middle << 32) | IDS)


@triton.jit
def _kept(raw, adjusted, edited, vocab, peak, inverse, first, cut, least, BLOCK: tl.constexpr):
    """Of the tokens up to `cut` that weigh at least `least`, and the first: last key and mass."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    last = tl.full([BLOCK], first, tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        x = read(raw, adjusted, edited, token, inside)
        key = key_of(x, token)
        weight = weight_of(x, peak, inverse)
        stays = inside & (key <= cut) & ((weight >= least) | (key == first))
        mass += tl.where(stays, weight, 0.0)
        last = tl.where(stays, tl.maximum(last, key), last)
    return tl.max(last, 0), tl.sum(mass, 0)


@triton.jit
def _reaches(mass, target, search):
    return tl.where(search == _TO_DRAW, mass > target, mass >= target)


@triton.jit
def _find(
    raw, adjusted, edited, places, vocab, peak, inverse, search, target, lo, hi,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first key in [lo, hi] up to which there is mass (or, for top_k, a count) of `target`, and
    how much there is. The last of them if there is too little. `lo` is the likeliest's key."""
    lane = tl.arange(0, BLOCK)
    base = target * 0.0  # float64
    depth = tl.cdiv(vocab, BLOCK)
    listed = 0  # not yet: every place is in question
    held = tl.zeros([BLOCK], tl.int32)
    while depth > 1:
        pivot = _pivot(lo, hi)
        mass = tl.zeros([BLOCK], tl.float64)
        count = tl.zeros([BLOCK], tl.int32)
        num_kept = tl.zeros([BLOCK], tl.int32)
        for step in range(0, depth):
            known = (listed == 1) & (step < held)
            place = tl.load(places + step * BLOCK + lane, mask=known, other=0).to(tl.int32)
            place = tl.where(listed == 1, place, step)
            token = place * BLOCK + lane
            inside = (known | (listed == 0)) & (token < vocab)
            x = read(raw, adjusted, edited, token, inside)
            key = key_of(x, token)
            weight = weight_of(x, peak, inverse)
            inside = inside & (key >= lo) & (key <= hi) & (weight > 0.0)
            before = inside & (key <= pivot)
            mass += tl.where(before, tl.where(search == _BY_COUNT, 1.0, weight), 0.0)
            count += before.to(tl.int32)
            # A list is never ahead of its reader: num_kept <= step.
            tl.store(places + num_kept * BLOCK + lane, place.to(tl.int16), mask=inside)
            num_kept += inside.to(tl.int32)
        tl.debug_barrier()  # the lists are read by other threads than wrote them
        listed = 1
        held = num_kept
        depth = tl.max(num_kept, 0)
        upper = tl.sum(mass, 0)
        goes_up = _reaches(base + upper, target, search) | (tl.sum(count, 0) == tl.sum(num_kept, 0))
        base = tl.where(goes_up, base, base + upper)
        lo = tl.where(goes_up, lo, pivot + 1)
        hi = tl.where(goes_up, pivot, hi)

    known = (listed == 1) & (held > 0)
    place = tl.load(places + lane, mask=known, other=0).to(tl.int32)
    token = place * BLOCK + lane
    inside = (known | (listed == 0)) & (token < vocab)
    x = read(raw, adjusted, edited, token, inside)
    key = key_of(x, token)
    weight = weight_of(x, peak, inverse)
    inside = inside & (weight > 0.0) & (key >= lo) & (key <= hi)
    weight = tl.where(inside, tl.where(search == _BY_COUNT, 1.0, weight), 0.0)
    left = tl.sum(inside.to(tl.int32), 0)
    while left > 1:
        pivot = _pivot(lo, hi)
        before = inside & (key >= lo) & (key <= pivot)
        upper = tl.sum(tl.where(before, weight, 0.0), 0)
        count = tl.sum(before.to(tl.int32), 0)
        goes_up = _reaches(base + upper, target, search) | (count == left)
        base = tl.where(goes_up, base, base + upper)
        lo = tl.where(goes_up, lo, pivot + 1)
        hi = tl.where(goes_up, pivot, hi)
        left = tl.where(goes_up, count, left - count)
    last = inside & (key >= lo) & (key <= hi)
    found = tl.max(tl.where(last, key, FIRST_KEY), 0)
    return found, base + tl.sum(tl.where(last, weight, 0.0), 0)


@triton.jit
def _farthest(peak, inverse, lowest, target, total, mean, spread):
    """The last key at which a search for a share of the mass may end.

    At most 1 − q of the mass is farther from the peak than mean + spread · √(q ∕ (1 − q)).
    """
    share = tl.minimum(target / total, 1.0 - 1e-9)
    bound = mean + spread * tl.sqrt(share / (1.0 - share))
    bound = tl.where(share < 1.0 - 1e-9, bound * 1.000001 + 1e-6, FARTHEST)
    value = tl.maximum((peak - tl.minimum(bound, FARTHEST) / inverse).to(tl.float32), lowest)
    return ((code_of(value) + 1) << 32) | IDS


@triton.jit
def _draw(
    raw, stride, adjusted, seen, places, columns, record, rows, vocab,
    BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(columns + TEMPERATURE * rows + row)
    slot = tl.load(columns + SLOT * rows + row).to(tl.int64)
    edited = (slot >= 0).to(tl.int32)
    raw += row.to(tl.int64) * stride
    adjusted += row.to(tl.int64) * vocab
    places += row.to(tl.int64) * PLACES
    first, lowest, numbers = survey(raw, adjusted, edited, vocab, BLOCK)
    highest = value_of(first >> 32)
    usable = numbers & (highest < float("inf")) & (highest > float("-inf"))
    drawn = first
    if usable & (temperature > 0.0):
        peak = highest.to(tl.float64)
        inverse = 1.0 / temperature
        total, mean, spread = moments(raw, adjusted, edited, vocab, peak, inverse, BLOCK)
        top_k = tl.load(columns + TOP_K * rows + row)
        top_p = tl.load(columns + TOP_P * rows + row)
        min_p = tl.load(columns + MIN_P * rows + row)
        point = tl.load(columns + UNIFORM * rows + row)
        mass = total
        cut = ((code_of(lowest) + 1) << 32) | IDS
        for search in range(0, 3):
            wanted = (search == _TO_DRAW) | ((search == _BY_COUNT) & (top_k > 0.0))
            if wanted | ((search == _TO_SHARE) & (top_p < 1.0)):
                share = tl.where(search == _TO_DRAW, point, tl.maximum(top_p, 1e-300))
                target = tl.where(search == _BY_COUNT, top_k, share * mass)
                bound = _farthest(peak, inverse, lowest, target, total, mean, spread)
                end = tl.where(search == _BY_COUNT, cut, tl.minimum(cut, bound))
                cut, mass = _find(
                    raw, adjusted, edited, places, vocab, peak, inverse, search, target, first,
                    end, BLOCK,
                )  # fmt: skip
            by_count = (search == _BY_COUNT) & (top_k > 0.0)
            if by_count | ((search == _TO_SHARE) & (min_p > 0.0)):
                least = tl.where(by_count, 0.0, min_p)
                cut, mass = _kept(
                    raw, adjusted, edited, vocab, peak, inverse, first, cut, least, BLOCK
                )
        drawn = cut
    token = tl.where(usable, drawn & IDS, 0)
    tl.store(record + row, token)
    tl.store(record + rows + row, usable.to(tl.int64))
    if (slot >= 0) & usable:
        at = seen + slot * vocab + token
        tl.store(at, tl.load(at) + 2)


def draw(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    seen: torch.Tensor,
    places: torch.Tensor,
    columns: torch.Tensor,
    *,
    block: int = BLOCK,
) -> torch.Tensor:
    """int64 [2, rows]: tokens, and whether the row is usable. A row with a slot is drawn from
    `adjusted` [rows, vocabulary], and its token counted in `seen`. `places` int16 [rows, vocabulary
    rounded up to blocks] is scratch."""
    rows, vocab = logits.shape
    record = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    _draw[(rows,)](
        logits, logits.stride(0), adjusted, seen, places, columns, record, rows, vocab,
        block, places.shape[1], num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return record
