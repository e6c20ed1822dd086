"""Which tokens a search is about, listed and weighed by many programs at once.

Every filter keeps the tokens up to some key (see rows.py), and the draw ends at one. Such a key is
found by what stands before it: its mass or, for top_k, its count. The edges (see masses.py) tell
between which two keys the search must end:

    peak ········ lo ···············  hi ········ cut ········ lowest
    [   base    )  [ in question      ]          what the search before left

Those in question are listed, then weighed at finer edges between lo and hi, then all but the few
between two of those are dropped. Searches of a row come one after the other; each leaves a cut and
the mass up to it to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.engine.kernels.masses import (
    NUM_EDGES,
    Masses,
    edge_of,
    peak_of,
    repeat,
    sums_of,
)
from quire.engine.kernels.rows import (
    BLOCK,
    FARTHEST,
    IDS,
    NUM_PARTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    WARPS,
    code_of,
    distance_of,
    key_of,
    read,
    row_pointers,
    value_of,
    weight_of,
)

BY_COUNT = tl.constexpr(0)
TO_SHARE = tl.constexpr(1)
TO_DRAW = tl.constexpr(2)
"""Searches of a row, in this order: top_k, top_p, the draw."""
_PARTS = tl.constexpr(NUM_PARTS)
_REFINE_BLOCK = 256
_REFINE_WARPS = 4
_DROP_BLOCK = 1024


class Searches(NamedTuple):
    """What the searches of all rows leave to each other."""

    places: torch.Tensor
    """int16 [rows, parts · size]: tokens in question, counted from the first of their part."""
    numbers: torch.Tensor
    """int32 [rows, parts]: how many there are."""
    cuts: torch.Tensor
    """int64 [rows]: the last key that the search before left."""
    sums: torch.Tensor
    """float64 [rows]: the mass up to it."""
    bounds: torch.Tensor
    """int64 [rows, 2]: lo and hi; 1 and 0 if there is no such search."""
    aims: torch.Tensor
    """float64 [rows, 3]: what is looked for, and mass and count before lo."""
    masses: torch.Tensor
    """float64 [rows, parts, edges]: of the candidates down to each of the finer edges."""
    counts: torch.Tensor
    """int32 [rows, parts, edges]: those that weigh something."""
    few: torch.Tensor
    """int32 [rows, 2 · block]: tokens still in question when they are few."""

    @classmethod
    def room(cls, rows: int, vocab: int, device: torch.device, block: int = BLOCK) -> Searches:
        size = part_size(vocab, block)
        assert size < 1 << 15, f"a vocabulary of {vocab} tokens is too large"
        return cls(
            torch.empty(rows, NUM_PARTS * size, dtype=torch.int16, device=device),
            torch.empty(rows, NUM_PARTS, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float64, device=device),
            torch.empty(rows, 2, dtype=torch.int64, device=device),
            torch.empty(rows, 3, dtype=torch.float64, device=device),
            torch.empty(rows, NUM_PARTS, NUM_EDGES.value, dtype=torch.float64, device=device),
            torch.empty(rows, NUM_PARTS, NUM_EDGES.value, dtype=torch.int32, device=device),
            torch.empty(rows, 2 * block, dtype=torch.int32, device=device),
        )


def part_size(vocab: int, block: int) -> int:
    """Tokens of each part, whole blocks."""
    return -(-vocab // (NUM_PARTS * block)) * block


@triton.jit
def reaches(mass, count, target, search):
    """A token is drawn if the mass up to it is more than the point; a filter wants no less."""
    enough = tl.where(search == BY_COUNT, count >= target, mass >= target)
    return tl.where(search == TO_DRAW, mass > target, enough)


@triton.jit
def _between(edges, masses, counts, first, cut, target, search):
    """The keys [lo, hi] between which a search ends, and mass and count before them."""
    ends = (code_of(edges) << 32) | IDS
    reached = reaches(masses, counts, target, search) | (ends >= cut)
    lo = tl.max(tl.where(reached, first, ends + 1), 0)
    hi = tl.min(tl.where(reached, ends, cut), 0)
    base = tl.max(tl.where(reached, 0.0, masses), 0)
    return lo, tl.minimum(hi, cut), base, tl.max(tl.where(reached, 0.0, counts), 0)


@triton.jit
def question(
    columns, firsts, lows, masses, counts, cuts, sums, rows, row, search, is_first,
    COUNTS: tl.constexpr,
):  # fmt: skip
    """Of a row: is there such a search, and the cut and mass that the one before left; then what
    it looks for, and [lo, hi] with mass and count before."""
    temperature = tl.load(columns + TEMPERATURE * rows + row)
    first, lowest, usable = peak_of(firsts, lows, row)
    top_k = tl.load(columns + TOP_K * rows + row)
    top_p = tl.load(columns + TOP_P * rows + row)
    point = tl.load(columns + UNIFORM * rows + row)
    edges = edge_of(
        tl.arange(0, NUM_EDGES), value_of(first >> 32).to(tl.float64), lowest, temperature
    )
    down_to = sums_of(masses, row)
    number_to = down_to * 0.0  # whole numbers: a search ends when their difference is one
    if COUNTS:
        number_to = sums_of(counts, row)
    all_of = (code_of(lowest) << 32) | IDS
    cut = tl.where(is_first != 0, all_of, tl.load(cuts + row, mask=is_first == 0, other=0))
    left = tl.load(sums + row, mask=is_first == 0, other=0.0)
    mass = tl.where(is_first != 0, tl.max(down_to, 0), left)
    cuts_count = (top_k > 0.0) & (top_k < tl.max(number_to, 0))
    wanted = (search == TO_DRAW) | ((search == BY_COUNT) & cuts_count)
    wanted = wanted | ((search == TO_SHARE) & (top_p < 1.0))
    wanted = wanted & usable & (temperature > 0.0)
    share = tl.where(search == TO_DRAW, point, tl.maximum(top_p, 1e-300))
    target = tl.where(search == BY_COUNT, top_k, share * mass)
    lo, hi, base, number = _between(edges, down_to, number_to, first, cut, target, search)
    return wanted, cut, mass, target, lo, hi, base, number


@triton.jit(do_not_specialize=["rows", "search", "is_first"])
def _collect(
    raw, stride, adjusted, columns, firsts, lows, masses, counts, places, numbers, cuts, sums,
    bounds, aims, rows, vocab, size, search, is_first, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    wanted, _, _, target, lo, hi, base, number = question(
        columns, firsts, lows, masses, counts, cuts, sums, rows, row, search, is_first, COUNTS
    )
    if part == 0:
        tl.store(bounds + row * 2, tl.where(wanted, lo, 1))
        tl.store(bounds + row * 2 + 1, tl.where(wanted, hi, 0))
        tl.store(aims + row * 3, target)
        tl.store(aims + row * 3 + 1, base)
        tl.store(aims + row * 3 + 2, number)
    if wanted:
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        places += (row.to(tl.int64) * _PARTS + part) * size
        lane = tl.arange(0, BLOCK)
        held = 0
        for start in range(part * size, tl.minimum((part + 1) * size, vocab), BLOCK):
            token = start + lane
            inside = token < vocab
            key = key_of(read(raw, adjusted, edited, token, inside), token)
            inside = inside & (key >= lo) & (key <= hi)
            one = inside.to(tl.int32)
            at = held + tl.cumsum(one, 0) - one
            tl.store(places + at, (token - part * size).to(tl.int16), mask=inside)
            held += tl.sum(one, 0)
        tl.store(numbers + row * _PARTS + part, held)


@triton.jit
def finer_edge(number, lo, hi):
    """float32; falls from lo to hi as the number rises."""
    high, low = value_of(lo >> 32), value_of(hi >> 32)
    span = high.to(tl.float64) - low.to(tl.float64)
    value = (high.to(tl.float64) - span * ((number + 1) * (1.0 / NUM_EDGES))).to(tl.float32)
    return tl.where(number == NUM_EDGES - 1, low, value)


@triton.jit
def _add(sums, amount, x, lo, hi):
    """To the sum of each edge above which, or at which, the logit is."""
    more = ()
    for j in tl.static_range(NUM_EDGES):
        more = more + (sums[j] + tl.where(x >= finer_edge(j, lo, hi), amount, 0),)
    return more


@triton.jit(do_not_specialize=["rows"])
def _refine(
    raw, stride, adjusted, columns, firsts, lows, places, numbers, bounds, finer_masses,
    finer_counts, rows, vocab, size, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    lo, hi = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    if lo <= hi:
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        peak = value_of(peak_of(firsts, lows, row)[0] >> 32).to(tl.float64)
        inverse = 1.0 / tl.load(columns + TEMPERATURE * rows + row)
        places += (row.to(tl.int64) * _PARTS + part) * size
        number = tl.load(numbers + row * _PARTS + part)
        lane = tl.arange(0, BLOCK)
        mass = repeat(tl.zeros([BLOCK], tl.float64))
        count = repeat(tl.zeros([BLOCK], tl.int32))
        for start in range(0, number, BLOCK):
            inside = start + lane < number
            place = tl.load(places + start + lane, mask=inside, other=0)
            x = read(raw, adjusted, edited, part * size + place.to(tl.int32), inside)
            weight = tl.where(inside, weight_of(x, peak, inverse), 0.0)
            mass = _add(mass, weight, x, lo, hi)
            count = _add(count, (weight > 0.0).to(tl.int32), x, lo, hi)
        at = (row * _PARTS + part) * NUM_EDGES
        for j in tl.static_range(NUM_EDGES):
            tl.store(finer_masses + at + j, tl.sum(mass[j], 0))
            tl.store(finer_counts + at + j, tl.sum(count[j], 0))


@triton.jit
def refined(finer_masses, finer_counts, row, search, target, lo, hi, base, number):
    """[lo, hi] after the finer edges, mass and count before, and how many are in it."""
    edges = finer_edge(tl.arange(0, NUM_EDGES), lo, hi)
    down_to = sums_of(finer_masses, row)
    number_to = sums_of(finer_counts, row).to(tl.float64)
    ends = (code_of(edges) << 32) | IDS
    reached = reaches(base + down_to, number + number_to, target, search) | (ends >= hi)
    before = tl.max(tl.where(reached, 0.0, number_to), 0)
    up_to = tl.min(tl.where(reached, number_to, tl.max(number_to, 0)), 0)
    return (
        tl.max(tl.where(reached, lo, ends + 1), 0),
        tl.minimum(tl.min(tl.where(reached, ends, hi), 0), hi),
        base + tl.max(tl.where(reached, 0.0, down_to), 0),
        number + before,
        up_to - before,
    )


@triton.jit(do_not_specialize=["rows", "search"])
def _drop(
    raw, stride, adjusted, columns, firsts, lows, places, numbers, bounds, aims, finer_masses,
    finer_counts, rows, vocab, size, search, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the candidates those that the finer edges leave, and that weigh something."""
    row, part = tl.program_id(0), tl.program_id(1)
    lo, hi = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    if lo <= hi:
        target, base = tl.load(aims + row * 3), tl.load(aims + row * 3 + 1)
        before = tl.load(aims + row * 3 + 2)
        lo, hi, _, _, _ = refined(
            finer_masses, finer_counts, row, search, target, lo, hi, base, before
        )
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        peak = value_of(peak_of(firsts, lows, row)[0] >> 32).to(tl.float64)
        inverse = 1.0 / tl.load(columns + TEMPERATURE * rows + row)
        places += (row.to(tl.int64) * _PARTS + part) * size
        number = tl.load(numbers + row * _PARTS + part)
        lane = tl.arange(0, BLOCK)
        held = 0
        for start in range(0, number, BLOCK):
            inside = start + lane < number
            place = tl.load(places + start + lane, mask=inside, other=0)
            token = part * size + place.to(tl.int32)
            x = read(raw, adjusted, edited, token, inside)
            key = key_of(x, token)
            stays = inside & (key >= lo) & (key <= hi)
            stays = stays & (distance_of(x, peak, inverse) < FARTHEST)
            one = stays.to(tl.int32)
            at = held + tl.cumsum(one, 0) - one
            tl.debug_barrier()  # all have read what is written over
            tl.store(places + at, place, mask=stays)
            held += tl.sum(one, 0)
        tl.debug_barrier()
        tl.store(numbers + row * _PARTS + part, held)


def collect(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    columns: torch.Tensor,
    weighed: Masses,
    searches: Searches,
    *,
    search: int,
    is_first: bool,
    counts: bool,
    block: int = BLOCK,
) -> None:
    """List the tokens that this search is about, and weigh them at finer edges; `is_first`: no
    other search came before it."""
    rows, vocab = logits.shape
    places, numbers, cuts, sums, bounds, aims, finer_masses, finer_counts, _ = searches
    size = part_size(vocab, block)
    _collect[(rows, NUM_PARTS)](
        logits, logits.stride(0), adjusted, columns, *weighed, places, numbers, cuts, sums,
        bounds, aims, rows, vocab, size, search, int(is_first), block, counts,
        num_warps=WARPS // 2, enable_fp_fusion=False,
    )  # fmt: skip
    _refine[(rows, NUM_PARTS)](
        logits, logits.stride(0), adjusted, columns, weighed.firsts, weighed.lows, places, numbers,
        bounds, finer_masses, finer_counts, rows, vocab, size, min(block, _REFINE_BLOCK),
        num_warps=_REFINE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _drop[(rows, NUM_PARTS)](
        logits, logits.stride(0), adjusted, columns, weighed.firsts, weighed.lows, places, numbers,
        bounds, aims, finer_masses, finer_counts, rows, vocab, size, search,
        min(block, _DROP_BLOCK), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
