"""What log probabilities are made of: a row's likeliest tokens, its peak and its mass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import (
    BLOCK,
    FIRST_KEY,
    IDS,
    LAST_KEY,
    WARPS,
    key_of,
    value_of,
    weight_of,
)


@triton.jit
def _next(raw, vocab, last, BLOCK: tl.constexpr):
    """The first key after `last`."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LAST_KEY, tl.int64)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = tl.load(raw + token, mask=token < vocab, other=0.0).to(tl.float32)
        key = key_of(x, token)
        best = tl.where((token < vocab) & (key > last), tl.minimum(best, key), best)
    return tl.min(best, 0)


@triton.jit
def _mass(raw, vocab, peak, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        x = tl.load(raw + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        mass += weight_of(x, peak, 1.0)
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["num_asked", "width"])
def _likeliest(raw, stride, record, asked, num_asked, found, width, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(asked + place)
    number = tl.load(asked + num_asked + place).to(tl.int32)
    raw += row * stride
    found += place.to(tl.int64) * width
    first = _next(raw, vocab, FIRST_KEY, BLOCK)
    peak = value_of(first >> 32).to(tl.float64)
    chosen = tl.load(raw + tl.load(record + row)).to(tl.float32)
    tl.store(found, chosen.to(tl.float64))
    tl.store(found + 1, peak)
    tl.store(found + 2, _mass(raw, vocab, peak, BLOCK))
    last = first - 1
    for rank in range(0, number):
        last = _next(raw, vocab, last, BLOCK)
        tl.store(found + 3 + 2 * rank, (last & IDS).to(tl.float64))
        tl.store(found + 4 + 2 * rank, value_of(last >> 32).to(tl.float64))


def likeliest(
    logits: torch.Tensor,
    record: torch.Tensor,
    asked: torch.Tensor,
    most: int,
    *,
    block: int = BLOCK,
) -> torch.Tensor:
    """float64 [asked, 3 + 2 · most]: logit of the token in `record`, peak, mass relative to it;
    then id and logit of the likeliest. `asked` int64 [2, asked]: row, and how many."""
    num_asked = asked.shape[1]
    width = 3 + 2 * most
    found = torch.zeros(num_asked, width, dtype=torch.float64, device=logits.device)
    _likeliest[(num_asked,)](
        logits, logits.stride(0), record, asked, num_asked, found, width, logits.shape[1], block,
        num_warps=WARPS,
    )  # fmt: skip
    return found
