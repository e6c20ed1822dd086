"""What the kernels that draw have in common: how a row is described, and the order of its tokens.

A token's *key* puts the tokens of a row in the order of the draw: the bits of its logit, turned so
that they rise as it falls, above its id. No two keys of a row are equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
"""Tokens that a program looks at together."""
WARPS = 16

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
FARTHEST = tl.constexpr(800.0)
"""exp of minus this is 0 in float64."""


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
    return tl.exp(-distance_of(value, peak, inverse))


@triton.jit
def read(raw, adjusted, edited, token, inside):
    plain = tl.load(raw + token, mask=inside & (edited == 0), other=0.0).to(tl.float32)
    changed = tl.load(adjusted + token, mask=inside & (edited != 0), other=0.0)
    return tl.where(edited != 0, changed, plain)


@triton.jit
def survey(raw, adjusted, edited, vocab, BLOCK: tl.constexpr):
    """The first key, the lowest finite logit, and whether all are numbers."""
    lane = tl.arange(0, BLOCK)
    first = tl.full([BLOCK], LAST_KEY, tl.int64)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        x = read(raw, adjusted, edited, token, inside)
        strange |= (inside & (x != x)).to(tl.int32)  # noqa: PLR0124
        first = tl.where(inside, tl.minimum(first, key_of(x, token)), first)
        lowest = tl.where(inside & (x > float("-inf")), tl.minimum(lowest, x), lowest)
    return tl.min(first, 0), tl.min(lowest, 0), tl.max(strange, 0) == 0


@triton.jit
def moments(raw, adjusted, edited, vocab, peak, inverse, BLOCK: tl.constexpr):
    """Of all tokens: mass, and mean and spread of their distances, weighted by it."""
    lane = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    once = tl.zeros([BLOCK], tl.float64)
    twice = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + lane
        inside = token < vocab
        distance = distance_of(read(raw, adjusted, edited, token, inside), peak, inverse)
        weight = tl.where(inside, tl.exp(-distance), 0.0)
        mass += weight
        weight *= distance
        once += weight
        twice += weight * distance
    total = tl.sum(mass, 0)
    mean = tl.sum(once, 0) / total
    return total, mean, tl.sqrt(tl.maximum(tl.sum(twice, 0) / total - mean * mean, 0.0))
