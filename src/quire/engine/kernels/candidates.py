"""Which tokens a search is about, listed by many programs at once.

Every filter keeps the tokens up to some key (see rows.py), and the draw ends at one. Such a key is
found by what stands before it: its mass or, for top_k, its count. The edges (see masses.py) tell
between which two keys the search must end:

    peak ········ lo ···············  hi ········ cut ········ lowest
    [   base    )  [ in question      ]          what the search before left

Searches of a row come one after the other; each leaves a cut and the mass up to it to the next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.engine.kernels.masses import NUM_EDGES, Masses, edge_of, peak_of, sums_of
from quire.engine.kernels.rows import (
    BLOCK,
    IDS,
    NUM_PARTS,
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
)

BY_COUNT = tl.constexpr(0)
TO_SHARE = tl.constexpr(1)
TO_DRAW = tl.constexpr(2)
"""Searches of a row, in this order: top_k, top_p, the draw."""
_PARTS = tl.constexpr(NUM_PARTS)


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
    few: torch.Tensor
    """int32 [rows, block]: tokens still in question when they are few."""

    @classmethod
    def room(cls, rows: int, vocab: int, device: torch.device, block: int = BLOCK) -> Searches:
        size = part_size(vocab, block)
        assert size < 1 << 15, f"a vocabulary of {vocab} tokens is too large"
        return cls(
            torch.empty(rows, NUM_PARTS * size, dtype=torch.int16, device=device),
            torch.empty(rows, NUM_PARTS, dtype=torch.int32, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float64, device=device),
            torch.empty(rows, block, dtype=torch.int32, device=device),
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
    rows, vocab, size, search, is_first, BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    wanted, _, _, _, lo, hi, _, _ = question(
        columns, firsts, lows, masses, counts, cuts, sums, rows, row, search, is_first, COUNTS
    )
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
    """List the tokens that this search is about; `is_first`: no other came before it."""
    rows, vocab = logits.shape
    places, numbers, cuts, sums, _ = searches
    _collect[(rows, NUM_PARTS)](
        logits, logits.stride(0), adjusted, columns, *weighed, places, numbers, cuts, sums,
        rows, vocab, part_size(vocab, block), search, int(is_first), block, counts,
        num_warps=WARPS // 2, enable_fp_fusion=False,
    )  # fmt: skip
