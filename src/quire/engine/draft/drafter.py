"""Drafter: a draft head beside its target on one rank.

Right after the target has computed a batch and tokens were drawn, the head computes the same places
with what it now knows to come next, into its own layer of the same pages:

    position        p − 2      p − 1      p           p + 1       p + 2
    token           t          t'         t″          drawn
    head's pair     (f, t')    (f, t″)    (f, drawn)  (out, d₁)   (out, d₂)
    about                                 d₁ ────────▶ d₂ ───────▶ d₃

f are the target's features, out is the head's own output. Up to p the pairs are final: they are
cached with the pages. Those of proposals are overwritten by the next batch. Behind proposals that
were rejected the pairs make no sense; they are overwritten too.

Knows the head, the bridge to the pages, and batches. What proposals are worth is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from quire.engine.attention import Heads
from quire.engine.attention.staging import Staging
from quire.engine.batch import Batch, Segment, SegmentResult
from quire.engine.branches import joined
from quire.engine.bridge import AttentionBridge, row_ends
from quire.engine.draft.eagle import EagleHead, Step


class _Chain(NamedTuple):
    """A segment after which tokens are proposed."""

    number: int
    """Of the segment."""
    segment: Segment
    row: int
    """Place in the packed row of the last token that counts."""
    position: int
    """That token's own."""


class Drafted(Protocol):
    """What a head has done with a batch."""

    def proposals(self, results: Sequence[SegmentResult]) -> dict[int, list[int]]:
        """By number of the segment, what may come after its results. Waits for it."""


class Drafts(Protocol):
    """A head, on one rank."""

    def follow(self, batch: Batch, features: torch.Tensor, drawn: torch.Tensor | None) -> Drafted:
        """Compute the pairs of a batch that the target has just computed. `features` [row, …];
        `drawn`: one token per row of the batch, on the device."""


class Drafter:
    def __init__(
        self, head: EagleHead, bridge: AttentionBridge, *, layer: int, device: torch.device
    ) -> None:
        """`layer`: its number, after all of the target's."""
        self.head = head
        self._bridge = bridge
        self._layer = layer
        self.device = device
        self.staging = Staging(device)
        self._scaling = head.spec.decoder.scaling

    def follow(self, batch: Batch, features: torch.Tensor, drawn: torch.Tensor | None) -> Computed:
        next_tokens, positions, places, sources = self.staging.send(
            [*_known(batch), *_drawn_places(batch)]
        )
        if drawn is not None and len(places):
            next_tokens = next_tokens.index_copy(0, places, drawn.index_select(0, sources))
        return Computed(self, batch, self.step(self.head.fused(features), next_tokens, positions))

    def again(self, batch: Batch, features: torch.Tensor, drawn: torch.Tensor | None) -> Computed:
        """As `follow`, of a batch for which the bridge was not prepared."""
        self._bridge.plan(batch)
        return self.follow(batch, features, drawn)

    @torch.inference_mode()
    def propose(
        self, batch: Batch, done: Step, results: Sequence[SegmentResult], *, branches: int = 0
    ) -> dict[int, list[int]]:
        """By number of the segment, what may come after its results: trees."""
        # Those that go furthest first: who is done leaves from the end.
        chains = sorted(_chains(batch, results), key=lambda chain: -chain.segment.ahead)
        if not chains:
            return {}
        (rows,) = self.staging.send([np.array([chain.row for chain in chains], np.int64)])
        hidden, normed = (x.index_select(0, rows) for x in done)
        trunks: dict[int, list[int]] = {chain.number: [] for chain in chains}
        beside: dict[int, list[list[int]]] = {chain.number: [] for chain in chains}
        for number in range(1, chains[0].segment.ahead + 1):
            likeliest = self.head.likeliest(normed, 1 + branches)
            tokens = likeliest[:, 0]
            for chain, (first, *others) in zip(chains, likeliest.tolist(), strict=True):
                trunks[chain.number].append(first)
                beside[chain.number].append(others)
            chains = [chain for chain in chains if chain.segment.ahead > number]
            if chains:
                part = Batch(batch.number, [_moved(chain, number) for chain in chains])
                positions, live = self._bridge.begin(part).positions, len(chains)
                hidden, normed = self.step(hidden[:live], tokens[:live], positions)
        return {number: joined(trunk, beside[number]) for number, trunk in trunks.items()}

    def step(
        self, hidden: torch.Tensor, next_tokens: torch.Tensor, positions: torch.Tensor
    ) -> Step:
        """One position further on each row; the bridge is prepared for these."""
        target = self._bridge.target(self._layer)

        def attend(heads: Heads) -> torch.Tensor:
            return self._bridge.attend(
                self._layer,
                heads,
                scaling=self._scaling,
                window=None,
                sinks=None,
                is_appended=target is not None,
            ).flatten(1)

        return self.head.step(hidden, next_tokens, positions, attend, target)


class Computed(NamedTuple):
    """A batch whose pairs were computed one by one."""

    drafter: Drafter
    batch: Batch
    done: Step

    def proposals(self, results: Sequence[SegmentResult]) -> dict[int, list[int]]:
        return self.drafter.propose(self.batch, self.done, results)


def _known(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of each place: the token after it, as far as it is known here, and its position."""
    following, positions = [], []
    for segment in batch.segments:
        tokens = np.frombuffer(segment.tokens, "<i4").astype(np.int64)
        following += [tokens[1:], np.array([max(0, segment.after)], np.int64)]
        positions.append(np.arange(segment.start, segment.start + len(tokens)))
    return np.concatenate(following), np.concatenate(positions)


def _drawn_places(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Places after which the token is drawn and not known, and which of the draws it is."""
    places = np.array(row_ends(batch), np.int64)
    is_drawn = np.array(
        [s.after < 0 for s in batch.segments for _ in range(s.num_rows)], dtype=np.bool_
    )
    return places[is_drawn], np.flatnonzero(is_drawn).astype(np.int64)


def _chains(batch: Batch, results: Sequence[SegmentResult]) -> list[_Chain]:
    found, end = [], 0
    for number, (segment, result) in enumerate(zip(batch.segments, results, strict=True)):
        end += segment.num_tokens
        if not segment.ahead or not result.is_usable:
            continue
        behind = segment.drafts - len(result.further)
        position = segment.start + segment.num_tokens - 1 - behind
        found.append(_Chain(number, segment, end - 1 - behind, position))
    return found


def _moved(chain: _Chain, count: int) -> Segment:
    """One place, so many positions further on."""
    segment = chain.segment
    return Segment(
        segment.id,
        bytes(4),
        chain.position + count,
        segment.pages,
        [],
        segment.row,
        window=segment.window,
        window_first=segment.window_first,
    )
