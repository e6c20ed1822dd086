"""A batch as columns: where its tokens go, and where the pages of its segments are found.

Work per segment is reading its fields; all else is done for the whole batch at once.
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
    """Positions are counted from the first of a segment's pages."""

    slots: Column
    """[tokens]: where each one's key and value go: page × page_size + offset; −1: nowhere."""
    starts: Column
    """[segments]: the position of its first token; the other two are [segments] too."""
    lengths: Column
    """Tokens from its first page to its last token."""
    firsts: Column
    """Where its page numbers begin in `pages`."""
    pages: Column


def columns(segments: Sequence[Segment], page_size: int, window: int = 0) -> Columns:
    """For layers that see a window of so many tokens, or all of them (0).

    Raises ValueError if a page table is too short for its segment, or begins too late.
    """
    starts = _column(segment.start for segment in segments)
    sizes = _column(len(segment.tokens) >> 2 for segment in segments)
    tables = [segment.pages for segment in segments]
    if window:
        tables = [segment.window for segment in segments]
        before = _column(segment.window_first for segment in segments) * page_size
        _check_windows(segments, before, starts, window)
        starts = starts - before
    lengths = starts + sizes
    counts = _column(len(table) >> 2 for table in tables)
    _check_tables(segments, counts, -(-lengths // page_size))
    pages = page_array(PageIds(b"".join(tables)))
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    places, of = starts, firsts
    if len(segments) < (num_tokens := int(sizes.sum())):
        ends = np.cumsum(sizes, dtype=np.int32)
        places = np.arange(num_tokens, dtype=np.int32) + np.repeat(lengths - ends, sizes)
        of = np.repeat(firsts, sizes)
    slots = pages[of + places // page_size] * page_size + places % page_size
    if any(segment.is_there for segment in segments):
        is_there = np.array([segment.is_there for segment in segments])
        slots[(np.cumsum(sizes) - sizes)[is_there]] = -1
    return Columns(slots, starts, lengths, firsts, pages)


def _column(values: Iterable[int]) -> Column:
    return np.fromiter(values, dtype=np.int32)


def _check_windows(
    segments: Sequence[Segment], before: Column, starts: Column, window: int
) -> None:
    late = before > np.maximum(0, starts - window + 1)
    if late.any():
        i = int(late.argmax())
        raise ValueError(
            f"{segments[i].id}: its window begins at {before[i]}, which is too late for {starts[i]}"
        )


def _check_tables(segments: Sequence[Segment], counts: Column, needed: Column) -> None:
    short = counts < needed
    if short.any():
        i = int(short.argmax())
        raise ValueError(f"{segments[i].id}: {counts[i]} pages for {needed[i]}")
