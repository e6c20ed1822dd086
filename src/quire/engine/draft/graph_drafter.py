"""GraphDrafter: a draft head's work after steps that only decode or verify, replayed as graphs.

What follows from the draws is found on the device: how many proposals were right, where each
sequence goes on, and in which places of its pages. So nothing waits between a step and its
proposals; both come to the host together.

    drawn ─▶ pairs of the whole batch ─▶ accepted ─▶ last pair ─▶ d₁ ─▶ one position on ─▶ d₂ ─▶ …

All other batches go the eager way of drafter.py, which is also what this is measured by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from quire.engine.attention.staging import Arriving
from quire.engine.attention.triton import TritonAttention
from quire.engine.batch import Batch, SegmentResult
from quire.engine.bridge import AttentionBridge
from quire.engine.draft.drafter import Drafted, Drafter
from quire.engine.forward.block import Sequences
from quire.engine.forward.graphs import GraphForward, GraphKind
from quire.engine.kernels.decode import Tables
from quire.engine.layouts import FULL


class GraphDrafter:
    def __init__(
        self,
        drafter: Drafter,
        graphs: GraphForward,
        bridge: AttentionBridge,
        backend: TritonAttention,
        *,
        max_tokens: int,
    ) -> None:
        """`backend`: of full attention; `max_tokens`: proposed for one sequence. Captures."""
        self._drafter = drafter
        self._graphs = graphs
        self._bridge = bridge
        self._backend = backend
        self._max_tokens = max_tokens
        kinds = graphs.drawing()
        device = drafter.device
        rows = max(kind.num_rows for kind in kinds)
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        shape = (max(kind.num_sequences for kind in kinds), max_tokens)
        self._proposed = torch.zeros(shape, dtype=torch.int64, device=device)
        most = max(max_tokens, shape[0]) + 1
        self._numbers = torch.arange(1, most, dtype=torch.int32, device=device)
        self._ones = torch.ones(most, dtype=torch.int32, device=device)
        self._replays = {
            kind: graphs.capture(self._work(kind)) for kind in sorted(kinds, reverse=True)
        }

    def follow(self, batch: Batch, features: torch.Tensor, drawn: torch.Tensor | None) -> Drafted:
        kind = self._graphs.replayed
        if kind is None:
            return self._drafter.follow(batch, features, drawn)
        is_known = any(segment.after >= 0 for segment in batch.segments)
        if kind not in self._replays or drawn is None or is_known:
            return self._drafter.again(batch, features, drawn)
        self._drawn[: len(drawn)].copy_(drawn)
        self._replays[kind]()
        if not any(segment.ahead for segment in batch.segments):
            return _Replayed(batch, None)
        proposed = self._proposed[: len(batch.segments)]
        return _Replayed(batch, self._drafter.staging.receive(proposed))

    def _work(self, kind: GraphKind) -> Callable[[], None]:
        block, count = self._graphs.block, kind.num_sequences
        width = kind.num_tokens // count
        """Tokens of a sequence, at most."""

        @torch.inference_mode()
        def work() -> None:
            self._graphs.enter(kind)
            inputs = block.inputs(kind.num_tokens, None)
            drawn = self._drawn[: kind.num_tokens]
            features = self._graphs.features_of(kind.num_tokens)
            head = self._drafter.head
            hidden, normed = self._drafter.step(head.fused(features), drawn, inputs.positions)
            sequences = block.sequences(FULL, count)
            accepted = _accepted(inputs.tokens, drawn, sequences, self._numbers[: width - 1])
            last = sequences.rows + accepted
            hidden, normed = (x.index_select(0, last) for x in (hidden, normed))
            positions = sequences.lengths - sequences.counts + accepted
            self._chain(kind, hidden, normed, positions, sequences)

        return work

    def _chain(
        self,
        kind: GraphKind,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        positions: torch.Tensor,
        sequences: Sequences,
    ) -> None:
        """Propose after each sequence's last pair, at `positions`."""
        head = self._drafter.head
        plans, further = self._plans(kind, positions, sequences)
        for number in range(self._max_tokens):
            tokens = head.proposed(head.logits(normed).argmax(-1))
            self._proposed[: len(tokens), number].copy_(tokens)
            if number < len(plans):
                self._bridge.enter({FULL: plans[number]}, set())
                hidden, normed = self._drafter.step(hidden, tokens, further[number])

    def _plans(
        self, kind: GraphKind, positions: torch.Tensor, sequences: Sequences
    ) -> tuple[list[Any], torch.Tensor]:
        """For one place of each sequence that goes on, one position further each time; and the
        positions."""
        size, count = self._bridge.page_size, len(positions)
        number = self._numbers[: self._max_tokens - 1, None]
        further = positions + number
        goes_on = sequences.ahead > number
        entries = (sequences.firsts + further // size).clamp(max=len(sequences.pages) - 1)
        slots = sequences.pages[entries.long()] * size + further % size
        slots = torch.where(goes_on, slots, -1)
        lengths = torch.where(goes_on, further + 1, 0)
        (table,) = self._graphs.block.tables(FULL, self._graphs.groups(kind)[:1])
        rows, ones = self._numbers[:count] - 1, self._ones[:count]
        plans = [
            self._backend.planned(
                slots[i],
                [
                    Tables(
                        rows,
                        ones,
                        lengths[i],
                        sequences.firsts,
                        sequences.pages,
                        table.split,
                        table.max_splits,
                    )
                ],
            )
            for i in range(self._max_tokens - 1)
        ]
        return plans, further


def _accepted(
    tokens: torch.Tensor, drawn: torch.Tensor, sequences: Sequences, number: torch.Tensor
) -> torch.Tensor:
    """[sequences], int32: how many proposals were drawn, one after the other. `number`: 1, 2, …,
    as many as a sequence may have."""
    if not len(number):
        return torch.zeros_like(sequences.rows)
    places = (sequences.rows[:, None] + number).clamp(max=len(tokens) - 1)
    is_right = tokens[places.long()] == drawn[places.long() - 1]
    is_right &= number < sequences.counts[:, None]
    return is_right.int().cumprod(1).sum(1, dtype=torch.int32)


class _Replayed(NamedTuple):
    batch: Batch
    tokens: Arriving | None
    """[segments, most]; None: nobody asked for any."""

    def proposals(self, results: Sequence[SegmentResult]) -> dict[int, list[int]]:
        if self.tokens is None:
            return {}
        tokens = self.tokens.wait().tolist()
        return {
            number: tokens[number][: segment.ahead]
            for number, segment in enumerate(self.batch.segments)
            if segment.ahead and results[number].is_usable
        }
