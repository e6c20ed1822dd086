"""Drafting: how proposals enter the batches that a scheduler chooses, and how they come out again.

Knows requests, segments and what Speculation says; neither who is chosen nor what is computed. A
scheduler has one if it speculates at all, and asks it in this order:

    must_know_tokens   may a batch be chosen, with others under way?
    propose            behind the last tokens of those that decode: what may come after them
    look_ahead         how many the ranks are to propose after each of the batch's segments
    begun, timed       a batch was chosen; how long it took
    heard              what became of a request's proposals

Every segment is chosen without proposals first: nobody lacks a page because of them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from quire.engine.batch import Batch, Segment, SegmentResult
from quire.engine.branches import num_levels
from quire.engine.draft.speculation import Speculation
from quire.engine.request import Request
from quire.engine.segments import Segments
from quire.types import RequestId


class Fate(NamedTuple):
    """Of one request's proposals in a batch."""

    accepted: int
    rejected: int


_NO_PROPOSALS = Fate(0, 0)


class Drafting:
    def __init__(self, speculation: Speculation, segments: Segments) -> None:
        self.speculation = speculation
        self._segments = segments
        self._last_number = 0
        """Of the last batch that had proposals, or after which some are to be made."""

    def must_know_tokens(self, decoding: Sequence[Request], under_way: Container[int]) -> bool:
        """Is a batch under way without whose tokens nothing can be chosen, or proposed?"""
        return self._last_number in under_way or any(
            request.draws and self.speculation.needs_tokens(request, len(decoding))
            for request in decoding
        )

    def propose(
        self, decoding: Sequence[Request], spare: int, chosen: dict[RequestId, Segment]
    ) -> int:
        """Put proposals into segments that were chosen for those that decode, `spare` tokens at
        most, as far as there is room for them. Returns how many those are."""
        total = 0
        for request in decoding:
            if request.flying or request.id not in chosen or chosen[request.id].drafts:
                continue
            proposed = self.speculation.propose(request, len(decoding), spare - total)
            branches = self.speculation.branches
            if request.held is not None:  # a grammar is at one place at a time: the trunk alone
                trunk = proposed[: num_levels(len(proposed), branches)]
                proposed, branches = request.held.fitting(trunk), 0
            if proposed and self._segments.extend(request, 1 + len(proposed)):
                segment = chosen[request.id]
                chosen[request.id] = self._segments.with_proposals(
                    request, segment, proposed, branches
                )
                total += len(proposed)
        return total

    def look_ahead(self, running: Sequence[Request], chosen: dict[RequestId, Segment]) -> None:
        """Have the ranks propose what comes after the segments that were chosen."""
        if not self.speculation.on_ranks:
            return
        for request in running:
            segment = chosen.get(request.id)
            if segment is None:
                continue
            ahead = 0
            if segment.row is not None:
                ahead = self.speculation.ahead(request, len(running))
            if ahead and not self._segments.extend(request, segment.num_tokens + ahead):
                ahead = 0
            chosen[request.id] = self._segments.with_ahead(request, segment, ahead)

    def begun(self, batch: Batch) -> None:
        if any(segment.drafts or segment.ahead for segment in batch.segments):
            self._last_number = batch.number

    def timed(self, batch: Batch, seconds: float) -> None:
        """A turn with this batch took so long. One after which tokens are proposed and that had
        none itself is neither plain nor of use."""
        segments = batch.segments
        if not all(s.row is not None and s.num_tokens == 1 + s.drafts for s in segments):
            return
        if batch.num_tokens > len(segments) or not any(s.ahead for s in segments):
            self.speculation.prices.observe(len(segments), batch.num_tokens, seconds)

    def heard(
        self, request: Request, segment: Segment, computed: SegmentResult, num_kept: int
    ) -> Fate:
        """What was drawn for it, of which so many tokens are in its answer."""
        self.speculation.offer(request, computed.proposed)
        if not segment.drafts or request.params.told:  # what it was told to say says nothing
            return _NO_PROPOSALS
        levels = num_levels(segment.drafts, segment.branches)
        self.speculation.saw(request, levels, len(computed.further))
        accepted = min(len(computed.further), num_kept)
        return Fate(accepted, segment.drafts - accepted)
