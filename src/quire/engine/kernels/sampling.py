"""Drawing tokens: searches among candidates, one program per row, which sorts nothing.

A search (see candidates.py) goes on between pivots, of which it knows the mass up to each:

    lo ········ pivot ····· pivot ······ pivot ········ hi
    [   base   )[ goes on here  ]

One pivot halves the interval of keys, so that after as many rounds as a key has bits there is
nothing left to search; the others divide the interval of logits, which is what usually ends it.
While the tokens in question are many each round reads them again; when they are few they stay in
registers, one in each lane. Masses are float64, added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.candidates import (
    BY_COUNT,
    TO_DRAW,
    TO_SHARE,
    Searches,
    collect,
    part_size,
    question,
    reaches,
    refined,
)
from quire.engine.kernels.masses import Masses, peak_of
from quire.engine.kernels.rows import (
    BLOCK,
    FARTHEST,
    FIRST_KEY,
    IDS,
    MIN_P,
    NUM_PARTS,
    SLOT,
    TEMPERATURE,
    WARPS,
    code_of,
    distance_of,
    key_of,
    read,
    row_pointers,
    value_of,
    weight_of,
)

_PARTS = tl.constexpr(NUM_PARTS)
_MAX_ROUNDS = tl.constexpr(64)
"""A key has 32 bits of a logit and less than 32 of an id; each round halves one of them."""


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
def _middle(lo, hi, vocab):
    """A key in [lo, hi), with as many codes on either side, or ids."""
    high, low = lo >> 32, hi >> 32
    last = tl.minimum(hi, (low << 32) + (vocab - 1))
    by_id = lo + ((last - lo) >> 1)
    return tl.where(high == low, by_id, ((high + ((low - high) >> 1)) << 32) | IDS)


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
def _candidate(raw, adjusted, edited, places, numbers, size, step, lo, hi, BLOCK: tl.constexpr):
    """Of the candidates of all parts the `step`th block: token, logit, key, and whether there is
    one that is in [lo, hi]."""
    at = step * BLOCK + tl.arange(0, BLOCK)
    part = at * 0
    begin = at * 0  # of the part, among all candidates
    end = 0
    for p in tl.static_range(_PARTS):
        end += tl.load(numbers + p)
        is_behind = at >= end
        part += is_behind.to(tl.int32)
        begin = tl.where(is_behind, end, begin)
    inside = at < end
    place = tl.load(places + part * size + at - begin, mask=inside, other=0)
    token = part * size + place.to(tl.int32)
    x = read(raw, adjusted, edited, token, inside)
    key = key_of(x, token)
    return token, x, key, inside & (key >= lo) & (key <= hi)


@triton.jit
def _choose(mass, count, target, search, pivot, lo, hi, base, number, left):
    """The side of the pivot on which the search goes on, with mass and count before it and count up
    to its end, where it must stop. `mass`, `count`: of all tokens up to the pivot."""
    up = reaches(mass, count, target, search) | (count >= left)
    return (
        tl.where(up, lo, tl.maximum(lo, pivot + 1)),
        tl.where(up, tl.minimum(hi, pivot), hi),
        tl.where(up, base, tl.maximum(base, mass)),
        tl.where(up, number, tl.maximum(number, count)),
        tl.where(up, tl.minimum(left, count), left),
    )


@triton.jit
def _up_to(weight, key, one, two, three):
    """Masses up to the pivots, and counts up to them and of all, two in each number."""
    some = (weight > 0.0).to(tl.int64)
    return (
        tl.where(key <= one, weight, 0.0),
        tl.where(key <= two, weight, 0.0),
        tl.where(key <= three, weight, 0.0),
        tl.where(key <= one, some, 0) + (tl.where(key <= two, some, 0) << 32),
        tl.where(key <= three, some, 0) + (some << 32),
    )


@triton.jit
def _plus(a, b, c, d, e, more_a, more_b, more_c, more_d, more_e):
    return a + more_a, b + more_b, c + more_c, d + more_d, e + more_e


@triton.jit
def _narrowed(
    mass_one, mass_two, mass_three, early, late, one, two, three, target, search, lo, hi, base,
    number,
):  # fmt: skip
    """[lo, hi] after a round, with mass and count before and count up to its end. What comes first
    is of each lane, as of `_up_to`."""
    mass_one, mass_two, mass_three, early, late = tl.reduce(
        (mass_one, mass_two, mass_three, early, late), 0, _plus
    )
    from_base, from_number = base, number
    left = number + (late >> 32)
    lo, hi, base, number, left = _choose(
        from_base + mass_one, from_number + (early & IDS), target, search, one, lo, hi, base,
        number, left,
    )  # fmt: skip
    lo, hi, base, number, left = _choose(
        from_base + mass_two, from_number + (early >> 32), target, search, two, lo, hi, base,
        number, left,
    )  # fmt: skip
    return _choose(
        from_base + mass_three, from_number + (late & IDS), target, search, three, lo, hi, base,
        number, left,
    )  # fmt: skip


@triton.jit
def _pivots(lo, hi, vocab):
    return _pivot(lo, hi, 0.33, vocab), _middle(lo, hi, vocab), _pivot(lo, hi, 0.67, vocab)


@triton.jit
def _find(
    raw, adjusted, edited, places, numbers, few, vocab, size, peak, inverse, search, target, lo, hi,
    base, number, in_question, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first key in [lo, hi] up to which there is mass (for top_k: a count) of `target`, or the
    last there is; and the mass up to it. `base`, `number`: mass and count before `lo`;
    `in_question`: tokens in [lo, hi] that weigh something. No other is ever found."""
    steps = tl.cdiv(tl.sum(tl.load(numbers + tl.arange(0, _PARTS)), 0), BLOCK)
    rounds = 0
    while (in_question > 2 * BLOCK) & (rounds < _MAX_ROUNDS):
        one, two, three = _pivots(lo, hi, vocab)
        mass_one = tl.zeros([BLOCK], tl.float64)
        mass_two = tl.zeros([BLOCK], tl.float64)
        mass_three = tl.zeros([BLOCK], tl.float64)
        early = tl.zeros([BLOCK], tl.int64)
        late = tl.zeros([BLOCK], tl.int64)
        for step in range(0, steps):
            _, x, key, inside = _candidate(
                raw, adjusted, edited, places, numbers, size, step, lo, hi, BLOCK
            )
            weight = tl.where(inside, weight_of(x, peak, inverse), 0.0)
            a, b, c, d, e = _up_to(weight, key, one, two, three)
            mass_one, mass_two, mass_three, early, late = _plus(
                mass_one, mass_two, mass_three, early, late, a, b, c, d, e
            )
        lo, hi, base, number, left = _narrowed(
            mass_one, mass_two, mass_three, early, late, one, two, three, target, search, lo, hi,
            base, number,
        )  # fmt: skip
        in_question = left - number
        rounds += 1

    held = 0
    for step in range(0, steps):
        token, x, key, inside = _candidate(
            raw, adjusted, edited, places, numbers, size, step, lo, hi, BLOCK
        )
        inside = inside & (distance_of(x, peak, inverse) < FARTHEST)
        is_one = inside.to(tl.int32)
        at = held + tl.cumsum(is_one, 0) - is_one
        tl.store(few + at, token, mask=inside & (at < 2 * BLOCK))
        held += tl.sum(is_one, 0)
    tl.debug_barrier()  # other threads may read than wrote
    lane = tl.arange(0, 2 * BLOCK)
    token = tl.load(few + lane, mask=lane < held, other=0)
    x = read(raw, adjusted, edited, token, lane < held)
    key = key_of(x, token)
    weight = tl.where(lane < held, weight_of(x, peak, inverse), 0.0)
    left = number + held
    rounds = 0
    while (left > number + 1) & (rounds < _MAX_ROUNDS):
        one, two, three = _pivots(lo, hi, vocab)
        inside = (key >= lo) & (key <= hi)
        a, b, c, d, e = _up_to(tl.where(inside, weight, 0.0), key, one, two, three)
        lo, hi, base, number, left = _narrowed(
            a, b, c, d, e, one, two, three, target, search, lo, hi, base, number
        )
        rounds += 1
    inside = (key >= lo) & (key <= hi) & (weight > 0.0)
    found = tl.max(tl.where(inside, key, FIRST_KEY), 0)
    return found, base + tl.sum(tl.where(inside, weight, 0.0), 0)


@triton.jit(do_not_specialize=["rows", "search", "is_first"])
def _search(
    raw, stride, adjusted, seen, columns, firsts, lows, masses, counts, places, numbers, cuts, sums,
    bounds, aims, finer_masses, finer_counts, few, record, rows, vocab, size, search, is_first,
    BLOCK: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first, _, usable = peak_of(firsts, lows, row)
    temperature = tl.load(columns + TEMPERATURE * rows + row)
    drawn = first
    if usable & (temperature > 0.0):
        raw, adjusted, edited = row_pointers(raw, stride, adjusted, columns, rows, vocab, row)
        peak = value_of(first >> 32).to(tl.float64)
        inverse = 1.0 / temperature
        wanted, cut, mass, target, lo, hi, base, number = question(
            columns, firsts, lows, masses, counts, cuts, sums, rows, row, search, is_first, COUNTS
        )
        if wanted:
            lo, hi, base, number, in_question = refined(
                finer_masses, finer_counts, row, search, target, lo, hi, base, number
            )
            cut, mass = _find(
                raw, adjusted, edited, places + row.to(tl.int64) * _PARTS * size,
                numbers + row * _PARTS, few + row * (2 * BLOCK), vocab, size, peak, inverse, search,
                target, lo, hi, base, number, in_question, BLOCK,
            )  # fmt: skip
        min_p = tl.load(columns + MIN_P * rows + row)
        if (search == TO_SHARE) & (min_p > 0.0):
            cut, mass = _kept(raw, adjusted, edited, vocab, peak, inverse, first, cut, min_p, BLOCK)
        tl.store(cuts + row, cut)
        tl.store(sums + row, mass)
        drawn = cut
    if search == TO_DRAW:
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
    searches: Searches,
    columns: torch.Tensor,
    weighed: Masses,
    *,
    draws: bool,
    counts: bool,
    shares: bool,
    block: int = BLOCK,
) -> torch.Tensor:
    """int64 [2, rows]: tokens, and whether the row is usable. A row with a slot is drawn from
    `adjusted` [rows, vocabulary], and its token counted in `seen`. `searches` has room for as many
    rows. `draws` and `counts`: as for `weigh`; `shares`: some row has a top_p or a min_p."""
    rows, vocab = logits.shape
    record = torch.empty(2, rows, dtype=torch.int64, device=logits.device)
    wanted = [BY_COUNT.value] * counts + [TO_SHARE.value] * shares + [TO_DRAW.value]
    searched = wanted if draws else wanted[-1:]
    for search in searched:
        is_first = search == searched[0]
        if draws:
            collect(
                logits, adjusted, columns, weighed, searches, search=search, is_first=is_first,
                counts=counts, block=block,
            )  # fmt: skip
        _search[(rows,)](
            logits, logits.stride(0), adjusted, seen, columns, *weighed, *searches, record,
            rows, vocab, part_size(vocab, block), search, int(is_first), block, counts,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return record
