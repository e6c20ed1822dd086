"""A rehearsal: batches that are not replayed as graphs, computed once at start, so that no request
waits for kernels to be compiled.

Kernels are compiled for how often sequences are split, which depends on how many there are and how
long: so there is a batch for each of that. Pages hold nothing yet: all of what comes before a
segment is one page, over and over. Knows models of full attention only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from quire.engine.batch import Batch, Segment
from quire.engine.forward import Forward
from quire.types import RequestId, page_ids

_SHORT_TOKENS = 100
"""Few enough for our own kernel."""
_LONG_TOKENS = 200
"""Too many for it."""
_BEFORE_TOKENS = 16384
"""Enough to be split."""
_COUNTS = (1, 2, 4, 8, 16, 32)


def rehearse(
    forward: Forward,
    *,
    page_size: int,
    num_pages: int,
    max_positions: int,
    chunk_tokens: int,
    progress: Callable[[float], None],
) -> None:
    """`num_pages` of the device; `chunk_tokens` in a batch at most, as later: for more there may be
    no memory. Launches, and waits for nothing."""
    batches = list(rehearsals(page_size, num_pages, max_positions, chunk_tokens))
    for done, batch in enumerate(batches):
        progress(done / len(batches))
        forward.logits(batch)


def rehearsals(
    page_size: int, num_pages: int, max_positions: int, chunk_tokens: int
) -> Iterator[Batch]:
    """Those for which there is room."""
    starts = (0, min(_BEFORE_TOKENS, max_positions - _LONG_TOKENS) // page_size * page_size)
    kinds = [(count, min(_SHORT_TOKENS, chunk_tokens // count)) for count in _COUNTS]
    kinds.append((1, min(_LONG_TOKENS, chunk_tokens)))
    for number, ((count, num_tokens), start) in enumerate(itertools.product(kinds, starts)):
        own = -(-num_tokens // page_size)
        if not num_tokens or 1 + count * own > num_pages or start < 0:
            continue
        before = [0] * (start // page_size)
        segments = [
            Segment(
                RequestId(f"rehearsal-{i}"),
                np.zeros(num_tokens, dtype="<i4").tobytes(),
                start,
                page_ids([*before, *range(1 + i * own, 1 + (i + 1) * own)]),
                [],
                None,
            )
            for i in range(count)
        ]
        yield Batch(number, segments)
