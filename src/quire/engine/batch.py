"""Batch: what the model computes in one step, for every rank alike; and what came of it.

Small typed messages: with tensor parallelism they travel to other processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.decoders import msgpack_decoder
from quire.engine.branches import walk
from quire.engine.sampling import Row, Sampled
from quire.types import NO_PAGES, NO_SLOT, OperationId, PageIds, RequestId

_NO_TOKEN = -1


class Segment(msgspec.Struct, frozen=True):
    """One request's part: tokens [start, start + n) computed on top of the `start` before them.

    position   0 ············ start ········ start + n
               [ in the pages )[ `tokens`   )
               ╰── `pages` covers all of it ─╯
                       ╰─ `window` this part ╯    what the queries may see in window layers

    Recurrent layers have one state of a sequence, in a slot. A snapshot is a state in a slot of
    its own: it is copied from before computing, or to after computing, and never computed in.

               restore ──copied──▶ state ──computed in place──▶ state ──copied──▶ save
    """

    id: RequestId
    tokens: bytes
    """n ≥ 1 ids, int32."""
    start: int
    pages: PageIds
    loads: list[OperationId]
    """Loads that still fill some of the pages: wait for each layer before using it."""
    row: Row | None
    """How to pick the token after the last one; None: more of the prompt is to come."""
    window: PageIds = NO_PAGES
    """Pages of the window layers' pool."""
    window_first: int = 0
    """Which page of the sequence, position ÷ page_size, `window` begins with."""
    state: int = NO_SLOT
    """The slot that is the request's own: no other segment of the batch has it."""
    restore: int = NO_SLOT
    """Snapshot to begin from, maybe of several segments. None: from nothing at start 0, else from
    what is in `state`."""
    save: int = NO_SLOT
    """Where to put a snapshot of the state after the last token."""
    follows: int = -1
    """Its only token is not known here yet: it is the one at this place of `drawn`, the tokens that
    the batch before drew, one per row, on the device. −1: `tokens` has it."""
    drafts: int = 0
    """So many of its last tokens are proposals: a token is drawn after each of them too, and after
    the one before them. Needs a row, which is the first draw's."""
    branches: int = 0
    """They are a tree, with so many beside each token of its trunk: see branches.py."""
    ahead: int = 0
    """So many tokens, one after the other, are to be proposed after the last one that is drawn and
    counts; `pages` has room for them."""
    allowed: list[bytes] = []
    """Under a grammar, for the draw after each proposal: as `Row.allowed`."""
    is_there: bool = False
    """The pages have the key and value of its first token already, and others read them: they are
    not written again."""
    after: int = -1
    """The token after its last, where that is known and somebody proposes; −1: it is drawn."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def num_rows(self) -> int:
        """Tokens drawn for it."""
        return 0 if self.row is None else 1 + self.drafts

    @property
    def proposed(self) -> list[int]:
        """Its proposals."""
        if not self.drafts:
            return []
        return [int(token) for token in np.frombuffer(self.tokens, "<i4")[-self.drafts :]]


class Batch(msgspec.Struct, frozen=True):
    number: int
    segments: list[Segment]

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


class SegmentResult(msgspec.Struct, frozen=True):
    sampled: Sampled | None = None
    """For segments with a row, on the rank that samples."""
    further: list[Sampled] = []
    """What was drawn after each of its proposals that was accepted: those before it were all drawn
    as they were proposed."""
    proposed: list[int] = []
    """What may come after them: see Segment.ahead."""
    failed: str = ""
    """A load it counted on failed: nothing computed for it may be used."""

    @property
    def is_usable(self) -> bool:
        """Were tokens drawn, and are they all?"""
        drawn = () if self.sampled is None else (self.sampled, *self.further)
        return bool(drawn) and not any(sampled.error for sampled in drawn)


def verified(segment: Segment, drawn: Sequence[Sampled]) -> SegmentResult:
    """What of its draws counts: all up to the first that is not what was proposed there."""
    if not segment.drafts:
        return SegmentResult(drawn[0])
    tokens = [_NO_TOKEN if sampled.error else sampled.token for sampled in drawn]
    right = walk(segment.proposed, segment.branches, tokens)
    return SegmentResult(drawn[0], [drawn[1 + number] for number in right])


class BatchResult(msgspec.Struct, frozen=True):
    number: int
    results: list[SegmentResult]
    """In the order of the segments."""


_encoder = msgspec.msgpack.Encoder()
_batch = msgpack_decoder(Batch)
_result = msgpack_decoder(BatchResult)


def encode(message: Batch | BatchResult) -> bytes:
    return _encoder.encode(message)


def decode_batch(data: bytes) -> Batch:
    """Raises msgspec.DecodeError."""
    batch: Batch = _batch.decode(data)
    return batch


def decode_result(data: bytes) -> BatchResult:
    """Raises msgspec.DecodeError."""
    result: BatchResult = _result.decode(data)
    return result
