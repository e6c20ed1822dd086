"""The gather and scatter both torch engines are made of. Knows tensors; no threads, no streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.device import word_dtype
from quire.memory.layout import PageLayout
from quire.types import PageIds

Planes = Sequence[tuple[torch.Tensor, ...]]
"""Per layer, per plane: [num_pages, chunk words]."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a copy: a pool's planes and which of its pages, in order."""

    planes: Planes
    pages: PageIds


class Run(NamedTuple):
    """Rows [source, source + length) that go to [target, target + length)."""

    source: int
    target: int
    length: int


def runs(source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> list[Run]:
    """The pairs as runs, in the order of their sources.

    Pages are often handed out and given back in order, forwards or backwards: then a copy of
    hundreds of pages is a few runs, and needs no gathering.
    """
    if not len(source):
        return []
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(source)]
    return [
        Run(int(source[first]), int(target[first]), last - first)
        for first, last in zip(starts, ends, strict=True)
    ]


def copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Run]) -> None:
    """Row by row as the runs say, without a stop in between."""
    for first, to, length in runs:
        target[to : to + length].copy_(source[first : first + length])


def staging_buffer(
    layout: PageLayout, num_pages: int, max_bytes: int, device: torch.device
) -> torch.Tensor:
    """[rows, chunk words] for up to `num_pages` chunks, bounded by `max_bytes` (at least one)."""
    rows = max(1, min(num_pages, max_bytes // layout.chunk_bytes))
    words = layout.chunk_bytes // layout.word_bytes
    return torch.empty(rows, words, dtype=word_dtype(layout), device=device)


def copy_rows(
    source: torch.Tensor,
    from_index: torch.Tensor,
    target: torch.Tensor,
    to_index: torch.Tensor,
    staging: torch.Tensor,
) -> None:
    """target[to_index] = source[from_index], at most a staging buffer at a time."""
    for start in range(0, len(from_index), len(staging)):
        wanted = from_index[start : start + len(staging)]
        rows = staging[: len(wanted)]
        torch.index_select(source, 0, wanted, out=rows)
        target.index_copy_(0, to_index[start : start + len(staging)], rows)
