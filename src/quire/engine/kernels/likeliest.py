"""What log probabilities are made of: a row's likeliest tokens, its peak and its mass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import (
    BLOCK,
    IDS,
    LAST_KEY,
    WARPS,
    key_of,
    moments,
    read,
    survey,
    value_of,
)


@triton.jit
def _likeliest(raw, stride, record, asked, num_asked, found, width, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(asked + place)
    number = tl.load(asked + num_asked + place).to(tl.int32)
    raw += row * stride
    found += place.to(tl.int64) * width
    first, _, _ = survey(raw, raw, 0, vocab, BLOCK)
    peak = value_of(first >> 32).to(tl.float64)
    total, _, _ = moments(raw, raw, 0, vocab, peak, 1.0, BLOCK)
    chosen = tl.load(raw + tl.load(record + row)).to(tl.float32)
    tl.store(found, chosen.to(tl.float64))
    tl.store(found + 1, peak)
    tl.store(found + 2, total)
    lane = tl.arange(0, BLOCK)
    last = first - 1
    for rank in range(0, number):
        best = tl.full([BLOCK], LAST_KEY, tl.int64)
        for start in range(0, vocab, BLOCK):
            token = start + lane
            inside = token < vocab
            key = key_of(read(raw, raw, 0, token, inside), token)
            best = tl.where(inside & (key > last), tl.minimum(best, key), best)
        last = tl.min(best, 0)
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
