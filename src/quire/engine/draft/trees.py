"""TreeDrafter: a draft head that proposes trees, and what becomes of a tree that was verified.

Of a tree one path counts. Its keys and values lie where the tree's tokens were put, and are moved
to where the path's tokens belong, before anybody else may see the pages:

    place      p        p+1   p+2   p+3   p+4        trunk d₁ d₂, beside them a₁ a₂
    computed   last     d₁    d₂    a₁    a₂
    kept       last     d₁    a₂                      d₁ was right, and a₂ after it

Then the head computes the places that count, and no others, and goes on from there: so it waits for
the draws, which a head that proposes chains does not. Knows pages, the head and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from quire.engine.batch import Batch, Segment, SegmentResult
from quire.engine.branches import placed
from quire.engine.draft.drafter import Drafted, Drafter
from quire.memory.device import DevicePool
from quire.types import page_array


class TreeDrafter:
    def __init__(self, drafter: Drafter, pool: DevicePool, *, branches: int) -> None:
        """`pool`: of the model's pages, the head's layer among them."""
        self._drafter = drafter
        self._pool = pool
        self._branches = branches

    def follow(self, batch: Batch, features: torch.Tensor, drawn: torch.Tensor | None) -> Drafted:
        if drawn is None or not any(s.drafts or s.ahead for s in batch.segments):
            return self._drafter.again(batch, features, drawn)
        return _Verified(self, batch, features, drawn)

    @torch.inference_mode()
    def go_on(
        self,
        batch: Batch,
        features: torch.Tensor,
        drawn: torch.Tensor,
        results: Sequence[SegmentResult],
    ) -> dict[int, list[int]]:
        """From what counts of a batch, as trees by number of the segment."""
        kept, rows, draws = [], [], []
        row = draw = 0
        for segment, result in zip(batch.segments, results, strict=True):
            right = _right(segment, result)
            self._move(segment, right)
            before = segment.num_tokens - segment.drafts
            rows += [*range(row, row + before), *(row + before + n for n in right)]
            draws += [draw, *(draw + 1 + n for n in right)] if segment.num_rows else []
            kept.append(_path(segment, right))
            row += segment.num_tokens
            draw += segment.num_rows
        of, drew = self._drafter.staging.send([np.array(rows), np.array(draws)])
        part = Batch(batch.number, kept)
        done = self._drafter.again(part, features.index_select(0, of), drawn.index_select(0, drew))
        return self._drafter.propose(part, done.done, results, branches=self._branches)

    def _move(self, segment: Segment, right: list[int]) -> None:
        """Keys and values of a path to where its tokens belong, in every layer."""
        if right == list(range(len(right))):
            return
        size, first = self._pool.layout.page_size, segment.start + segment.num_tokens
        first -= segment.drafts
        pages = page_array(segment.pages).astype(np.int64)
        places = np.array([[first + n for n in right], range(first, first + len(right))])
        there, here = self._drafter.staging.send(list(pages[places // size] * size + places % size))
        for layer in range(self._pool.layout.num_layers):
            for plane in self._pool.planes(layer):
                flat = plane.flatten(0, 1)
                flat.index_copy_(0, here, flat.index_select(0, there))


class _Verified(NamedTuple):
    drafter: TreeDrafter
    batch: Batch
    features: torch.Tensor
    drawn: torch.Tensor

    def proposals(self, results: Sequence[SegmentResult]) -> dict[int, list[int]]:
        return self.drafter.go_on(self.batch, self.features, self.drawn, results)


def _right(segment: Segment, result: SegmentResult) -> list[int]:
    """Numbers of the proposals that were drawn, as the result has them."""
    if not segment.drafts or result.sampled is None:
        return []
    drawn = [sampled.token for sampled in (result.sampled, *result.further)]
    return placed(segment.proposed, segment.branches, drawn[:-1])


def _path(segment: Segment, right: list[int]) -> Segment:
    """As if these had been proposed, and nothing else."""
    if not segment.drafts:
        return segment
    known = segment.tokens[: -4 * segment.drafts]
    tokens = np.array([segment.proposed[n] for n in right], "<i4").tobytes()
    return msgspec.structs.replace(segment, tokens=known + tokens, drafts=len(right), branches=0)
