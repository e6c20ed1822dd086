"""Drawing tokens: one program per row, which reads the row again and sorts nothing.

Every filter keeps the tokens up to some key (see rows.py), and the draw ends at one. Such a key is
found by bisection on the mass of what stands before it:

    peak ········ lo ····· pivot ····· hi ········ cut ········ lowest
    [   base    )  [  upper ]                                          masses of tokens
                     tokens in [lo, hi] are still in question

The first lo and hi are the edges between which the search must end (see masses.py). Pivots
divide the interval of logits, then of ids among equals. Each lane of a program looks after the
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
def _pivot(lo, hi, share, vocab):
    """A key in [lo, hi): a share of the way in logits, or in ids if those are equal."""
    high, low = lo >> 32, hi >> 32
    middle = code_of(value_of(high) * (1.0 - share) + value_of(low) * share)
    middle = tl.minimum(tl.maximum(middle, high), low - 1)
    last = tl.minimum(hi, (low << 32) + (vocab - 1))
    by_id = tl.minimum(lo + ((last - lo).to(tl.float32) * share).to(tl.int64), last - 1)
    return tl.where(high == low, by_id, (middle << 32) | IDS)


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
    x = read(raw, adjusted, edited, lane, lane < vocab)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        key = key_of(x, token)
        inside = (token < vocab) & (key >= lo) & (key <= hi)
        # Before the store: what comes after one waits for it.
        x = read(raw, adjusted, edited, token + BLOCK, token + BLOCK < vocab)
        tl.store(places + held * BLOCK + lane, (token // BLOCK).to(tl.int16), mask=inside)
        held += inside.to(tl.int32)
    tl.debug_barrier()  # other threads may read the lists than wrote them
    return held


@triton.jit
def _listed(raw, adjusted, edited, places, held, step, lo, hi, BLOCK: tl.constexpr):
    """Of every lane what is at `step` of its list: place, logit, key, and whether it is there and
    in [lo, hi]."""
    lane = tl.arange(0, BLOCK)
    inside = step < held
    place = tl.load(places + step * BLOCK + lane, mask=inside, other=0)
    token = place.to(tl.int32) * BLOCK + lane
    x = read(raw, adjusted, edited, token, inside)
    key = key_of(x, token)
    return place, x, key, inside & (key >= lo) & (key <= hi)


@triton.jit
def _shorten(raw, adjusted, edited, places, held, lo, hi, BLOCK: tl.constexpr):
    """Lists without what is no longer in [lo, hi]."""
    lane = tl.arange(0, BLOCK)
    kept = tl.zeros([BLOCK], tl.int32)
    for step in range(0, tl.max(held, 0)):
        place, _, _, inside = _listed(raw, adjusted, edited, places, held, step, lo, hi, BLOCK)
        # Written behind where it is read: kept <= step.
        tl.store(places + kept * BLOCK + lane, place, mask=inside)
        kept += inside.to(tl.int32)
    tl.debug_barrier()
    return kept


@triton.jit
def _choose(mass, count, left, target, search, pivot, lo, hi, base, number):
    """The side of the pivot on which the search goes on, with mass and count before it. `mass`,
    `count`: of all tokens up to the pivot; `left`: count up to the end, where it must stop."""
    up = _reaches(mass, count, target, search) | (count >= left)
    return (
        tl.where(up, lo, tl.maximum(lo, pivot + 1)),
        tl.where(up, tl.minimum(hi, pivot), hi),
        tl.where(up, base, tl.maximum(base, mass)),
        tl.where(up, number, tl.maximum(number, count)),
    )


@triton.jit
def _find(
    raw, adjusted, edited, places, vocab, peak, inverse, search, target, lo, hi, base, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first key in [lo, hi] up to which there is mass (for top_k: a count) of `target`, or the
    last there is; and the mass up to it. `base`, `number`: mass and count before `lo`. A token
    without weight is never found."""
    held = _list(raw, adjusted, edited, places, vocab, lo, hi, BLOCK)
    depth = tl.max(held, 0)
    while depth > 1:
        one = _pivot(lo, hi, 0.25, vocab)
        two = _pivot(lo, hi, 0.5, vocab)
        three = _pivot(lo, hi, 0.75, vocab)
        mass_one = tl.zeros([BLOCK], tl.float64)
        mass_two = tl.zeros([BLOCK], tl.float64)
        mass_three = tl.zeros([BLOCK], tl.float64)
        # Counts to the pivots and to the end, of up to 2^15 tokens per lane.
        early = tl.zeros([BLOCK], tl.int32)
        late = tl.zeros([BLOCK], tl.int32)
        for step in range(0, depth):
            _, x, key, inside = _listed(raw, adjusted, edited, places, held, step, lo, hi, BLOCK)
            weight = tl.where(inside, weight_of(x, peak, inverse), 0.0)
            inside = weight > 0.0
            mass_one += tl.where(key <= one, weight, 0.0)
            mass_two += tl.where(key <= two, weight, 0.0)
            mass_three += tl.where(key <= three, weight, 0.0)
            early += (inside & (key <= one)).to(tl.int32)
            early += (inside & (key <= two)).to(tl.int32) << 16
            late += (inside & (key <= three)).to(tl.int32)
            late += inside.to(tl.int32) << 16
        left = number + tl.sum(late >> 16, 0)
        from_base, from_number = base, number
        lo, hi, base, number = _choose(
            from_base + tl.sum(mass_one, 0), from_number + tl.sum(early & 0xFFFF, 0),
            left, target, search, one, lo, hi, base, number,
        )  # fmt: skip
        lo, hi, base, number = _choose(
            from_base + tl.sum(mass_two, 0), from_number + tl.sum(early >> 16, 0),
            left, target, search, two, lo, hi, base, number,
        )  # fmt: skip
        lo, hi, base, number = _choose(
            from_base + tl.sum(mass_three, 0), from_number + tl.sum(late & 0xFFFF, 0),
            left, target, search, three, lo, hi, base, number,
        )  # fmt: skip
        held = _shorten(raw, adjusted, edited, places, held, lo, hi, BLOCK)
        depth = tl.max(held, 0)

    _, x, key, inside = _listed(raw, adjusted, edited, places, held, 0, lo, hi, BLOCK)
    weight = tl.where(inside, weight_of(x, peak, inverse), 0.0)
    inside = weight > 0.0
    left = number + tl.sum(inside.to(tl.int32), 0)
    while left > number + 1:
        pivot = _pivot(lo, hi, 0.5, vocab)
        before = inside & (key >= lo) & (key <= pivot)
        mass = base + tl.sum(tl.where(before, weight, 0.0), 0)
        count = number + tl.sum(before.to(tl.int32), 0)
        lo, hi, base, number = _choose(
            mass, count, left, target, search, pivot, lo, hi, base, number
        )
        left = tl.where(hi == pivot, count, left)
    inside = inside & (key >= lo) & (key <= hi)
    found = tl.max(tl.where(inside, key, FIRST_KEY), 0)
    return found, base + tl.sum(tl.where(inside, weight, 0.0), 0)


@triton.jit(do_not_specialize=["rows"])
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
        number_to = down_to * 0.0  # whole numbers: a search ends when their difference is one
        if COUNTS:
            number_to = sums_of(counts, row)
        cuts_count = (top_k > 0.0) & (top_k < tl.max(number_to, 0))
        mass = tl.max(down_to, 0)
        cut = (code_of(lowest) << 32) | IDS
        for search in range(0, 3):
            wanted = (search == _TO_DRAW) | ((search == _BY_COUNT) & cuts_count)
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
