"""Drawing tokens: one program per row, which reads the row again and sorts nothing.

Every filter keeps the tokens up to some key (see rows.py), and the draw ends at one. Such a key is
found by bisection on the mass of what stands before it:

    peak ········ lo ····· pivot ····· hi ········ cut ········ lowest
    [   base    )  [  upper ]                                          masses of tokens
                     tokens in [lo, hi] are still in question

The first lo and hi are the edges between which the search must end (see masses.py). The pivot
halves the interval of logits, then of ids among equals. Each lane of a program looks after the
tokens id = place · BLOCK + lane, and keeps a list of the places that are still in question; so a
pass costs what the longest list costs. With one token left per lane the bisection goes on in
registers. Masses are float64, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.masses import NUM_EDGES, Masses, edge_of, peak_of, sums_of
from quire.engine.kernels.rows import (
    BLOCK,
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
    read,
    row_pointers,
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
def _reaches(mass, count, target, search):
    """A token is drawn if the mass up to it is more than the point; a filter wants no less."""
    enough = tl.where(search == _BY_COUNT, count >= target, mass >= target)
    return tl.where(search == _TO_DRAW, mass > target, enough)


@triton.jit
def _between(edges, masses, counts, first, cut, target, search):
    """The keys [lo, hi] between which a search ends, and mass and count before them."""
    ends = (code_of(edges) << 32) | IDS
    reached = _reaches(masses, counts, target, search) | (ends >= cut)
    lo = tl.max(tl.where(reached, first, ends + 1), 0)
    hi = tl.min(tl.where(reached, ends, cut), 0)
    base = tl.max(tl.where(reached, 0.0, masses), 0)
    return lo, tl.minimum(hi, cut), base, tl.max(tl.where(reached, 0.0, counts), 0)


@triton.jit
def _list(raw, adjusted, edited, places, vocab, lo, hi, BLOCK: tl.constexpr):
    """Each lane's places with a key in [lo, hi], and how many they are."""
    lane = tl.arange(0, BLOCK)
    held = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = read(raw, adjusted, edited, token, token < vocab)
        key = key_of(x, token)
        inside = (token < vocab) & (key >= lo) & (key <= hi)
        place = (token // BLOCK).to(tl.int16)
        tl.store(places + held * BLOCK + lane, place, mask=inside)
        held += inside.to(tl.int32)
    tl.debug_barrier()  # other threads may read the lists than wrote them
    return held


@triton.jit
def _listed(
    raw, adjusted, edited, places, held, step, peak, inverse, lo, hi, BLOCK: tl.constexpr
):  # fmt: skip
    """Of every lane the place at `step` of its list, its key and weight, and whether it is there
    and in [lo, hi]. A token without weight is never found."""
    lane = tl.arange(0, BLOCK)
    inside = step < held
    place = tl.load(places + step * BLOCK + lane, mask=inside, other=0)
    token = place.to(tl.int32) * BLOCK + lane
    x = read(raw, adjusted, edited, token, inside)
    key = key_of(x, token)
    weight = weight_of(x, peak, inverse)
    return place, key, weight, inside & (key >= lo) & (key <= hi) & (weight > 0.0)


@triton.jit
def _find(
    raw, adjusted, edited, places, vocab, peak, inverse, search, target, lo, hi, base, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first key in [lo, hi] up to which there is mass (for top_k: a count) of `target`, or the
    last there is; and the mass up to it. `base`, `number`: mass and count before `lo`."""
    lane = tl.arange(0, BLOCK)
    held = _list(raw, adjusted, edited, places, vocab, lo, hi, BLOCK)
    depth = tl.max(held, 0)
    while depth > 1:
        pivot = _pivot(lo, hi)
        mass = tl.zeros([BLOCK], tl.float64)
        count = tl.zeros([BLOCK], tl.int32)
        kept = tl.zeros([BLOCK], tl.int32)
        for step in range(0, depth):
            place, key, weight, inside = _listed(
                raw, adjusted, edited, places, held, step, peak, inverse, lo, hi, BLOCK
            )
            before = inside & (key <= pivot)
            mass += tl.where(before, weight, 0.0)
            count += before.to(tl.int32)
            # A list is written behind where it is read: kept <= step.
            tl.store(places + kept * BLOCK + lane, place, mask=inside)
            kept += inside.to(tl.int32)
        tl.debug_barrier()
        held = kept
        depth = tl.max(kept, 0)
        upper = base + tl.sum(mass, 0)
        num_upper = tl.sum(count, 0)
        goes_up = _reaches(upper, number + num_upper, target, search)
        goes_up |= num_upper == tl.sum(kept, 0)
        base = tl.where(goes_up, base, upper)
        number = tl.where(goes_up, number, number + num_upper)
        lo = tl.where(goes_up, lo, pivot + 1)
        hi = tl.where(goes_up, pivot, hi)

    _, key, weight, inside = _listed(
        raw, adjusted, edited, places, held, 0, peak, inverse, lo, hi, BLOCK
    )
    left = tl.sum(inside.to(tl.int32), 0)
    while left > 1:
        pivot = _pivot(lo, hi)
        before = inside & (key >= lo) & (key <= pivot)
        upper = base + tl.sum(tl.where(before, weight, 0.0), 0)
        num_upper = tl.sum(before.to(tl.int32), 0)
        goes_up = _reaches(upper, number + num_upper, target, search) | (num_upper == left)
        base = tl.where(goes_up, base, upper)
        number = tl.where(goes_up, number, number + num_upper)
        lo = tl.where(goes_up, lo, pivot + 1)
        hi = tl.where(goes_up, pivot, hi)
        left = tl.where(goes_up, num_upper, left - num_upper)
    inside = inside & (key >= lo) & (key <= hi)
    found = tl.max(tl.where(inside, key, FIRST_KEY), 0)
    return found, base + tl.sum(tl.where(inside, weight, 0.0), 0)


@triton.jit
def _draw(
    raw, stride, adjusted, seen, places, columns, firsts, lows, masses, counts, record, rows, vocab,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(columns + TEMPERATURE * rows + row)
    first, lowest, usable = peak_of(firsts, lows, row)
    drawn = first
    if usable & (temperature > 0.0):
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        places += row.to(tl.int64) * PLACES
        top_k = tl.load(columns + TOP_K * rows + row)
        top_p = tl.load(columns + TOP_P * rows + row)
        min_p = tl.load(columns + MIN_P * rows + row)
        point = tl.load(columns + UNIFORM * rows + row)
        peak = value_of(first >> 32).to(tl.float64)
        inverse = 1.0 / temperature
        edges = edge_of(tl.arange(0, NUM_EDGES), peak, lowest, temperature)
        down_to = sums_of(masses, row)
        number_to = down_to
        if COUNTS:
            number_to = sums_of(counts, row)
        mass = tl.max(down_to, 0)
        cut = (code_of(lowest) << 32) | IDS
        for search in range(0, 3):
            wanted = (search == _TO_DRAW) | ((search == _BY_COUNT) & (top_k > 0.0))
            if wanted | ((search == _TO_SHARE) & (top_p < 1.0)):
                share = tl.where(search == _TO_DRAW, point, tl.maximum(top_p, 1e-300))
                target = tl.where(search == _BY_COUNT, top_k, share * mass)
                lo, hi, base, number = _between(
                    edges, down_to, number_to, first, cut, target, search
                )
                cut, mass = _find(
                    raw, adjusted, edited, places, vocab, peak, inverse, search, target, lo, hi,
                    base, number, BLOCK,
                )  # fmt: skip
            if (search == _TO_SHARE) & (min_p > 0.0):
                cut, mass = _kept(
                    raw, adjusted, edited, vocab, peak, inverse, first, cut, min_p, BLOCK
                )
        drawn = cut
    token = tl.where(usable, drawn & IDS, 0)
    tl.store(record + row, token)
    tl.store(record + rows + row, usable.to(tl.int64))
    slot = tl.load(columns + SLOT * rows + row).to(tl.int64)
    if (slot >= 0) & usable:
        at = seen + slot * vocab + token
        tl.store(at, tl.load(at) + 2)


def draw(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    seen: torch.Tensor,
    places: torch.Tensor,
    columns: torch.Tensor,
    weighed: Masses,
    *,
    counts: bool,
    block: int = BLOCK,
) -> torch.Tensor:
    """int64 [2, rows]: tokens, and whether the row is usable. A row with a slot is drawn from
    `adjusted` [rows, vocabulary], and its token counted in `seen`. `places` int16 [rows, vocabulary
    rounded up to blocks] is scratch. `counts`: as for `weigh`."""
    rows, vocab = logits.shape
    record = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    _draw[(rows,)](
        logits, logits.stride(0), adjusted, seen, places, columns, *weighed, record, rows, vocab,
        block, places.shape[1], counts, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return record
