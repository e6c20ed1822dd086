"""Rows into their slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _scatter(rows, slots, words, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(
            words + slot * size + at, tl.load(rows + row * size + at, mask=inside), mask=inside
        )


def scatter(rows: torch.Tensor, slots: torch.Tensor, words: torch.Tensor) -> None:
    """`rows` [rows, size] into `words` [slots, size], both contiguous; `slots` −1: nowhere."""
    assert rows.is_contiguous()
    assert words.is_contiguous()
    size = words.shape[1]
    _scatter[(len(rows), triton.cdiv(size, _BLOCK))](rows, slots, words, size, BLOCK=_BLOCK)
