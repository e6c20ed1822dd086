"""Biases and penalties: how histories are counted, and what they do to logits.

A history is a row of `seen`, int32 [slots, vocabulary]: of each token 2 · (times in the output),
and 1 more if it is in the prompt. The kernel that draws adds the token it drew: see sampling.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.engine.kernels.rows import BLOCK, FREQUENCY, NUM_BIASES, PRESENCE, REPETITION, SLOT


@triton.jit
def _penalised(x, state, columns, rows, row):
    """As on the host, bit for bit. `state`: of the token, 2 · (times in the output) + (1 if it is
    in the prompt)."""
    repetition = tl.load(columns + REPETITION * rows + row).to(tl.float32)
    presence = tl.load(columns + PRESENCE * rows + row)
    frequency = tl.load(columns + FREQUENCY * rows + row)
    times = (state >> 1).to(tl.float64)
    factor = tl.where(state > 0, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    return x - (tl.where(times > 0, presence, 0.0) + frequency * times).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _penalise(raw, stride, adjusted, seen, columns, rows, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.load(columns + SLOT * rows + row).to(tl.int64)
    if slot >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        at = row.to(tl.int64)
        x = tl.load(raw + at * stride + token, mask=inside, other=0.0).to(tl.float32)
        state = tl.load(seen + slot * vocab + token, mask=inside, other=0)
        x = _penalised(x, state, columns, rows, row)
        tl.store(adjusted + at * vocab + token, x, mask=inside)


@triton.jit(do_not_specialize=["rows", "room"])
def _bias(
    raw, stride, adjusted, seen, tokens, biases, room, columns, rows, vocab, BLOCK: tl.constexpr
):
    """Again from the raw logits, for the tokens with a bias: it comes before penalties."""
    row = tl.program_id(0)
    slot = tl.load(columns + SLOT * rows + row).to(tl.int64)
    number = tl.load(columns + NUM_BIASES * rows + row).to(tl.int32)
    at = row.to(tl.int64)
    for start in range(0, number, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < number
        token = tl.load(tokens + slot * room + entry, mask=inside, other=0)
        x = tl.load(raw + at * stride + token, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(biases + slot * room + entry, mask=inside, other=0.0)
        state = tl.load(seen + slot * vocab + token, mask=inside, other=0)
        x = _penalised(x, state, columns, rows, row)
        tl.store(adjusted + at * vocab + token, x, mask=inside)


def edit(
    logits: torch.Tensor,
    adjusted: torch.Tensor,
    seen: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    columns: torch.Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """Fill `adjusted` float32 [rows, vocabulary] for the rows that have a slot. `seen` int32
    [slots, vocabulary]; `biases`, unless no row has any: tokens int32 and values [slots, room]."""
    rows, vocab = logits.shape
    _penalise[(rows, triton.cdiv(vocab, block))](
        logits, logits.stride(0), adjusted, seen, columns, rows, vocab, block,
        enable_fp_fusion=False,
    )  # fmt: skip
    if biases is not None:
        tokens, values = biases
        _bias[(rows,)](
            logits, logits.stride(0), adjusted, seen, tokens, values, tokens.shape[1], columns,
            rows, vocab, 256, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_parts"])
def _note(seen, tokens, parts, num_parts, drawn, vocab, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    slot = tl.load(parts + part)
    start = tl.load(parts + num_parts + part)
    prompt_end = tl.load(parts + 2 * num_parts + part)
    end = tl.load(parts + 3 * num_parts + part)
    follows = tl.load(parts + 4 * num_parts + part)
    at = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < end, other=-1)
    known = (token >= 0) & (token < vocab)
    counts = seen + slot * vocab
    tl.atomic_or(counts + token, 1, mask=known & (at < prompt_end))
    tl.atomic_add(counts + token, 2, mask=known & (at >= prompt_end))
    if (follows >= 0) & (tl.program_id(1) == 0):
        tl.atomic_add(counts + tl.load(drawn + follows), 2)


def note(
    seen: torch.Tensor, tokens: torch.Tensor, parts: torch.Tensor, longest: int, drawn: torch.Tensor
) -> None:
    """Count histories into cleared slots of `seen`. `tokens` int32: all of them, one after the
    other; `parts` int64 [5, histories]: slot, [start, end of the prompt, end), and the place in
    `drawn` of one more token, or −1. `longest`: tokens of the longest."""
    num_parts = parts.shape[1]
    _note[(num_parts, triton.cdiv(max(longest, 1), 1024))](
        seen, tokens, parts, num_parts, drawn, seen.shape[1], 1024
    )
