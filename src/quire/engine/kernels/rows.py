"""What the kernels that draw have in common: how a row is described, and the order of its tokens.

A token's *key* puts the tokens of a row in the order of the draw: the bits of its logit, turned so
that they rise as it falls, above its id. No two keys of a row are equal.

Kernels are not specialised on what changes from batch to batch: nothing is compiled after the start
(see DeviceSampler.warm_up).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
"""Tokens that a program looks at together."""
WARPS = 16
NUM_PARTS = 16
"""Programs that share a row where all of it is looked at. Always as many, and their results are
added in one order: what a row gives does not depend on the batch."""

# Rows of the float64 table [columns, rows] that says how each row is drawn.
TEMPERATURE = tl.constexpr(0)
"""0: greedy."""
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
UNIFORM = tl.constexpr(4)
SLOT = tl.constexpr(5)
"""Of its history and biases; −1: it has none."""
REPETITION = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
FREQUENCY = tl.constexpr(8)
NUM_BIASES = tl.constexpr(9)
NUM_COLUMNS = 10

LAST_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
FIRST_KEY = tl.constexpr(-0x8000000000000000)
IDS = tl.constexpr(0xFFFFFFFF)
"""Bits of a key that hold the id."""
FARTHEST = tl.constexpr(700.0)
"""A token so many temperatures below the likeliest weighs nothing; less is still a float64."""


@triton.jit
def code_of(value):
    """Rises as the float32 falls; equals have the same (−0 equals 0)."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (~tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)).to(tl.int64)


@triton.jit
def value_of(code):
    rising = ~code.to(tl.int32)
    return tl.where(rising < 0, rising ^ 0x7FFFFFFF, rising).to(tl.float32, bitcast=True)


@triton.jit
def key_of(value, token):
    return (code_of(value) << 32) | token.to(tl.int64)


@triton.jit
def distance_of(value, peak, inverse):
    """Below the likeliest, in temperatures."""
    return tl.minimum((peak - value.to(tl.float64)) * inverse, FARTHEST)


@triton.jit
def weight_of(value, peak, inverse):
    """exp of the scaled logit; the likeliest has 1."""
    distance = distance_of(value, peak, inverse)
    return tl.where(distance < FARTHEST, tl.exp(-distance), 0.0)


@triton.jit
def read(raw, adjusted, edited, token, inside):
    plain = tl.load(raw + token, mask=inside & (edited == 0), other=0.0).to(tl.float32)
    changed = tl.load(adjusted + token, mask=inside & (edited != 0), other=0.0)
    return tl.where(edited != 0, changed, plain)


@triton.jit
def row_pointers(raw, stride, adjusted, columns, rows, vocab, row):
    """Where a row's logits are, raw and adjusted, and whether the adjusted ones count."""
    edited = (tl.load(columns + SLOT * rows + row) >= 0.0).to(tl.int32)
    return raw + row.to(tl.int64) * stride, adjusted + row.to(tl.int64) * vocab, edited
