"""What log probabilities are made of: a row's likeliest tokens, its peak and its mass.

NUM_PARTS programs per row each find the likeliest of their part, which they hold in registers; then
one program per row takes the likeliest of those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import (
    IDS,
    LAST_KEY,
    NUM_PARTS,
    WARPS,
    key_of,
    value_of,
    weight_of,
)

_PARTS = tl.constexpr(NUM_PARTS)
_ROOM = 32
"""Likeliest tokens per part that there is room for; more if somebody asks for more."""
_LOWEST = tl.constexpr(-3e38)


@triton.jit(do_not_specialize=["num_asked"])
def _in_part(
    raw, stride, asked, num_asked, keys, sums, vocab, size, SIZE: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    place, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(asked + place)
    number = tl.load(asked + num_asked + place).to(tl.int32)
    at = tl.arange(0, SIZE)
    token = part * size + at
    inside = (at < size) & (token < vocab)
    x = tl.load(raw + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    key = tl.where(inside, key_of(x, token), LAST_KEY)
    peak = tl.maximum(tl.max(x, 0), _LOWEST).to(tl.float64)
    place = place * _PARTS + part
    tl.store(sums + place * 2, peak)
    tl.store(sums + place * 2 + 1, tl.sum(weight_of(x, peak, 1.0), 0))
    last = tl.min(key, 0)
    for rank in range(0, number):
        tl.store(keys + place * ROOM + rank, last)
        last = tl.min(tl.where(key > last, key, LAST_KEY), 0)


@triton.jit(do_not_specialize=["num_asked", "width"])
def _of_parts(
    raw, stride, record, asked, num_asked, keys, sums, found, width, ROOM: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(asked + place)
    number = tl.load(asked + num_asked + place).to(tl.int32)
    part = place * _PARTS + tl.arange(0, _PARTS)
    peaks, masses = tl.load(sums + part * 2), tl.load(sums + part * 2 + 1)
    peak = tl.max(peaks, 0)
    chosen = tl.load(raw + row * stride + tl.load(record + row)).to(tl.float32)
    found += place.to(tl.int64) * width
    tl.store(found, chosen.to(tl.float64))
    tl.store(found + 1, peak)
    tl.store(found + 2, tl.sum(masses * tl.exp(peaks - peak), 0))
    at = tl.arange(0, _PARTS * ROOM)
    key = tl.load(keys + place * _PARTS * ROOM + at, mask=at % ROOM < number, other=LAST_KEY)
    last = tl.min(key, 0)
    for rank in range(0, number):
        tl.store(found + 3 + 2 * rank, (last & IDS).to(tl.float64))
        tl.store(found + 4 + 2 * rank, value_of(last >> 32).to(tl.float64))
        last = tl.min(tl.where(key > last, key, LAST_KEY), 0)


def likeliest(
    logits: torch.Tensor, record: torch.Tensor, asked: torch.Tensor, most: int
) -> torch.Tensor:
    """float64 [asked, 3 + 2 · most]: logit of the token in `record`, peak, mass relative to it;
    then id and logit of the likeliest. `asked` int64 [2, asked]: row, and how many of them."""
    device, vocab, num_asked = logits.device, logits.shape[1], asked.shape[1]
    room = max(_ROOM, triton.next_power_of_2(most))
    size = triton.cdiv(vocab, NUM_PARTS)
    keys = torch.empty(num_asked, NUM_PARTS, room, dtype=torch.int64, device=device)
    sums = torch.empty(num_asked, NUM_PARTS, 2, dtype=torch.float64, device=device)
    width = 3 + 2 * most
    found = torch.empty(num_asked, width, dtype=torch.float64, device=device)
    _in_part[(num_asked, NUM_PARTS)](
        logits, logits.stride(0), asked, num_asked, keys, sums, vocab, size,
        triton.next_power_of_2(size), room, num_warps=WARPS,
    )  # fmt: skip
    _of_parts[(num_asked,)](
        logits, logits.stride(0), record, asked, num_asked, keys, sums, found, width, room
    )
    return found
