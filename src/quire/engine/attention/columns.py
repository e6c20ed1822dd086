"""A batch of single tokens as columns, without a step per segment beyond reading its fields.

The same as packing it, for batches that only decode: those are many, and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.batch import Segment
from quire.types import PageIds, page_array

Column = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Columns:
    """One number per segment, but for `pages`."""

    slots: Column
    """Where its key and value go: page × page_size + offset."""
    lengths: Column
    """Tokens in its pages, its own included."""
    firsts: Column
    """Where its page numbers begin in `pages`."""
    pages: Column


def columns(segments: Sequence[Segment], page_size: int, window: int = 0) -> Columns:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ValueError if a page table is too short for its segment, or begins too late.
    """
    last = _column(segment.start for segment in segments)
    tables = [segment.pages for segment in segments]
    if window:
        tables = [segment.window for segment in segments]
        before = _column(segment.window_first for segment in segments) * page_size
        _refuse(segments, before > np.maximum(0, last - window + 1), "its window begins too late")
        last = last - before
    pages = page_array(PageIds(b"".join(tables)))
    counts = _column(len(table) >> 2 for table in tables)
    _refuse(segments, counts <= last // page_size, "its page table is too short")
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    slots = pages[firsts + last // page_size] * page_size + last % page_size
    return Columns(slots, last + 1, firsts, pages)


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, dtype=np.int32)


def _refuse(segments: Sequence[Segment], wrong: npt.NDArray[np.bool_], reason: str) -> None:
    if wrong.any():
        segment = segments[int(wrong.argmax())]
        raise ValueError(f"{segment.id}: {reason} for {segment.start}")
