"""What an attention backend is: writes a layer's new keys and values into pages, and attends.

A backend is given a Packing once per batch and called once per layer. It knows tensors and page
tables; neither requests nor the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.attention.columns import columns
from quire.engine.batch import Batch, Segment
from quire.engine.branches import depths


@dataclass(frozen=True, slots=True)
class RowSpan:
    """One segment within the packed row."""

    first: int
    """Its first token's place in the row."""
    num_tokens: int
    start: int
    """That token's position, counted from the first of `pages`."""
    pages: npt.NDArray[np.int32]
    drafts: int = 0
    """So many of its last tokens are a tree's, with so many"""
    branches: int = 0
    """beside each of its trunk; 0: they are tokens like any."""

    @property
    def length(self) -> int:
        """Tokens from the first page to the last query."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class BatchPacking:
    """A batch as one row of tokens."""

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    """Where each token's key and value go: page × page_size + offset; −1: nowhere."""
    fresh: npt.NDArray[np.int64]
    """Pages begun but not filled by this batch. They are to be zeroed first: what an earlier owner
    left in their unused part is masked, but a NaN there would still come through."""
    spans: list[RowSpan]


class Heads(NamedTuple):
    """Of a row of tokens. Key and value have as many heads as the pages, or a part of them."""

    query: torch.Tensor
    """[heads, row, dim], as the other two."""
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """Where a layer's new keys and values go."""

    keys: torch.Tensor
    """The layer's pages, [pages, page_size, kv heads, dim]; so are `values`."""
    values: torch.Tensor
    slots: torch.Tensor
    """[row]; −1: nowhere."""


class AttentionBackend(Protocol):
    def plan(self, packing: BatchPacking) -> Any:
        """Whatever `attend` needs for this batch, made once for all layers. Does not wait for the
        device."""

    def target(self, plan: Any, layer: int) -> Target | None:
        """For a caller who writes keys and values into the pages himself and then says so to
        `attend`; None: that is not possible here."""

    def attend(
        self,
        plan: Any,
        layer: int,
        heads: Heads,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        is_appended: bool = False,
    ) -> torch.Tensor:
        """→ [row, query heads, dim].

        `sinks` [heads] are logits that take part in each softmax and have no value.
        Keys and values are in the pages when it returns; `is_appended`: they already were.
        """


def pack(batch: Batch, page_size: int, window: int = 0) -> BatchPacking:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ValueError if a page table is too short for its segment.
    """
    segments = batch.segments
    found = columns(segments, page_size, window)
    tokens = np.frombuffer(b"".join(segment.tokens for segment in segments), dtype="<i4")
    positions = np.concatenate([_positions(segment) for segment in segments])
    needed = -(-found.lengths // page_size)
    last = (needed - 1) * page_size
    begun = (last >= found.starts) & (last + page_size > found.lengths)
    spans: list[RowSpan] = []
    first = 0
    tables = zip(
        found.starts.tolist(), found.firsts.tolist(), needed.tolist(), segments, strict=True
    )
    for start, at, count, segment in tables:
        drafts = segment.drafts if segment.branches else 0
        pages = found.pages[at : at + count]
        spans.append(RowSpan(first, segment.num_tokens, start, pages, drafts, segment.branches))
        first += segment.num_tokens
    return BatchPacking(
        tokens.astype(np.int64),
        positions,
        found.slots.astype(np.int64),
        found.pages[(found.firsts + needed - 1)[begun]].astype(np.int64),
        spans,
    )


def _positions(segment: Segment) -> npt.NDArray[np.int64]:
    """In the sequence. In a tree of proposals, tokens beside each other have the same."""
    end = segment.start + segment.num_tokens
    if not segment.branches:
        return np.arange(segment.start, end, dtype=np.int64)
    last = end - segment.drafts - 1
    tree = [last + depth for depth in depths(segment.drafts, segment.branches)]
    return np.array([*range(segment.start, last + 1), *tree], dtype=np.int64)
