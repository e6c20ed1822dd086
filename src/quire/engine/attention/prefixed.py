"""Attention over a part of the keys, with its log-sum-exp: what it takes to merge parts.

Who computes a part, on CUDA in half precision:

    cuDNN    twice as fast as the others. But it builds a plan for every new pair of lengths, which
             takes it up to half a second: so it gets a few lengths only, and others are cut up
    flash    the rest: short parts, what is left over, whatever cuDNN refuses
    others   whatever is installed and was found to be faster than these

Everything else, and what both refuse, is computed by the definition. Knows tensors only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from quire.engine.attention.base import Heads

_logger = logging.getLogger(__name__)

_MIN_PIECE = 2048
"""Queries or keys: with fewer, cuDNN is not faster. It gets so many, or times a power of"""
_STEP = 4
_MAX_SCORES = 1 << 26
"""Held at once when computing by the definition."""


class AttendedPart(NamedTuple):
    out: torch.Tensor
    """[heads, queries, dim]"""
    lse: torch.Tensor
    """[heads, queries], float32: log Σ e^score"""


class AttentionWay(Protocol):
    def __call__(self, heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
        """`heads`: of queries, and of keys that may be more; contiguous in dim.

        `is_causal`: as many keys as queries, and none looks ahead. Raises RuntimeError for what it
        cannot compute.
        """


class AttentionWays:
    """The ways there are for one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        on_cuda = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        self._fast: list[AttentionWay] = [_cudnn, _cudnn_repeated] if on_cuda else []
        self._others: list[AttentionWay] = [_flash, by_definition] if on_cuda else [by_definition]

    def consider(self, way: AttentionWay, seconds: Callable[[AttentionWay, int], float]) -> None:
        """Use it where it is faster. `seconds`: what a way takes for a part of so many queries."""
        for ways, count in ((self._fast, _MIN_PIECE), (self._others, _MIN_PIECE // _STEP)):
            if ways and seconds(way, count) < seconds(ways[0], count):
                ways.insert(0, way)

    def cut(self, length: int) -> Iterator[int]:
        """Into lengths that the fast way takes, and at most one that it does not."""
        for piece in reversed(self.fast_lengths(length)):
            while length >= piece:
                yield piece
                length -= piece
        if length:
            yield length

    def fast_lengths(self, longest: int) -> list[int]:
        """Those that the fast way takes, up to `longest`."""
        found: list[int] = []
        length = _MIN_PIECE
        while self._fast and length <= longest:
            found.append(length)
            length *= _STEP
        return found

    def is_fast(self, length: int) -> bool:
        return length in self.fast_lengths(length)

    def __call__(self, heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
        if self.is_fast(heads.query.shape[1]) and self.is_fast(heads.key.shape[1]):
            ways = (*self._fast, *self._others)
        else:
            ways = (*self._others,)
        for way in ways[:-1]:
            try:
                return way(heads, is_causal, scaling)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                _logger.info("attention: %s refuses: %s", getattr(way, "__name__", way), error)
                for those in (self._fast, self._others):
                    if way in those:
                        those.remove(way)
        return ways[-1](heads, is_causal, scaling)


def by_definition(heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
    """In float32, some queries at a time."""
    query, key, value = heads
    num_heads, num_queries, _ = query.shape
    group = num_heads // key.shape[0]
    k, v = (x.float().repeat_interleave(group, 0) for x in (key, value))
    out = query.new_empty((num_queries, num_heads, value.shape[2])).transpose(0, 1)
    lse = torch.empty((num_heads, num_queries), dtype=torch.float32, device=query.device)
    size = max(1, _MAX_SCORES // (num_heads * key.shape[1]))
    for first in range(0, num_queries, size):
        some = slice(first, min(num_queries, first + size))
        scores = query[:, some].float() @ k.transpose(1, 2) * scaling
        if is_causal:
            ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device)
            scores = scores.masked_fill(ahead.triu(first + 1), float("-inf"))
        lse[:, some] = scores.logsumexp(-1)
        out[:, some] = ((scores - lse[:, some, None]).exp() @ v).to(query.dtype)
    return AttendedPart(out, lse)


def _flash(heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
    query, key, value = (x[None] for x in heads)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scaling
    )
    return AttendedPart(out[0], lse[0])


def _cudnn(heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
    query, key, value = (x[None] for x in heads)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scaling
    )
    return AttendedPart(out[0], lse[0].flatten(1))


def _cudnn_repeated(heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
    """Where it does not take fewer heads of keys than of queries."""
    group = heads.query.shape[0] // heads.key.shape[0]
    key, value = (x.repeat_interleave(group, 0) for x in heads[1:])
    return _cudnn(Heads(heads.query, key, value), is_causal, scaling)
