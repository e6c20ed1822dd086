"""What an attention backend is: writes a layer's new keys and values into pages, and attends.

A backend is given a Packing once per batch and called once per layer. It knows tensors and page
tables; neither requests nor the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.batch import Batch, Segment
from quire.types import page_array


@dataclass(frozen=True, slots=True)
class Span:
    """One segment within the packed row."""

    first: int
    """Its first token's place in the row."""
    num_tokens: int
    start: int
    """That token's position, counted from the first of `pages`."""
    pages: npt.NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens from the first page to the last query."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Packing:
    """A batch as one row of tokens."""

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    """Where each token's key and value go: page × page_size + offset."""
    fresh: npt.NDArray[np.int64]
    """Pages begun but not filled by this batch. They are to be zeroed first: what an earlier owner
    left in their unused part is masked, but a NaN there would still come through."""
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a layer's new keys and values go."""

    keys: torch.Tensor
    """The layer's pages, [pages, page_size, kv heads, dim]; so are `values`."""
    values: torch.Tensor
    slots: torch.Tensor
    """[row]; −1: nowhere."""


class AttentionBackend(Protocol):
    def plan(self, packing: Packing) -> Any:
        """Whatever `attend` needs for this batch, made once for all layers. Does not wait for the
        device."""

    def target(self, plan: Any, layer: int) -> Target | None:
        """For a caller who writes keys and values into the pages himself and then says so to
        `attend`; None: that is not possible here."""

    def attend(
        self,
        plan: Any,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        is_appended: bool = False,
    ) -> torch.Tensor:
        """query [heads, row, dim], key and value [kv heads, row, dim] → [row, heads, dim].

        `sinks` [heads] are logits that take part in each softmax and have no value.
        Keys and values are in the pages when it returns; `is_appended`: they already were.
        """


def pack(batch: Batch, page_size: int, window: int = 0) -> Packing:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ValueError if a page table is too short for its segment.
    """
    spans: list[Span] = []
    tokens: list[npt.NDArray[np.int32]] = []
    positions: list[npt.NDArray[np.int64]] = []
    slots: list[npt.NDArray[np.int64]] = []
    fresh: list[int] = []
    first = 0
    for segment in batch.segments:
        ids = np.frombuffer(segment.tokens, dtype="<i4")
        places = np.arange(segment.start, segment.start + len(ids), dtype=np.int64)
        pages, before = _table(segment, page_size, window)
        start = segment.start - before
        needed = -(-(start + len(ids)) // page_size)
        if len(pages) < needed:
            raise ValueError(f"{segment.id}: {len(pages)} pages for {needed}")
        tokens.append(ids)
        positions.append(places)
        places = places - before
        slots.append(pages[places // page_size].astype(np.int64) * page_size + places % page_size)
        last = (needed - 1) * page_size
        if last >= start and last + page_size > start + len(ids):
            fresh.append(int(pages[needed - 1]))
        spans.append(Span(first, len(ids), start, pages[:needed]))
        first += len(ids)
    return Packing(
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(positions),
        np.concatenate(slots),
        np.array(fresh, dtype=np.int64),
        spans,
    )


def _table(segment: Segment, page_size: int, window: int) -> tuple[npt.NDArray[np.int32], int]:
    """Pages of a segment, and how many positions come before the first of them."""
    if not window:
        return page_array(segment.pages), 0
    before = segment.window_first * page_size
    if before > max(0, segment.start - window + 1):
        raise ValueError(
            f"{segment.id}: its window begins at {before}, which is too late for {segment.start}"
        )
    return page_array(segment.window), before
