"""ModelRunner: one rank's model, run over batches with what it keeps in Quire's pages.

The model is any decoder of transformers that `models.support` lets through. Its attention is ours:
see bridge.py. A model without recurrent layers computes a batch as one packed row. One with them
cannot: all single tokens are computed together, one sequence a row, and every longer segment by
itself. Sampling is done here too, where the logits are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.engine.batch import Batch, BatchResult, SegmentResult
from quire.engine.bridge import AttentionBridge
from quire.engine.sampling import sample
from quire.engine.states import States


class ModelRunner:
    def __init__(
        self,
        model: torch.nn.Module,
        bridge: AttentionBridge,
        *,
        device: torch.device,
        states: States | None = None,
        samples: bool = True,
    ) -> None:
        """`states`: of the recurrent layers, if there are any. `samples`: this rank picks the
        tokens."""
        self._model = model
        self._bridge = bridge
        self._device = device
        self._states = states
        self._samples = samples

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        logits = self.logits(batch)
        rows = [segment.row for segment in batch.segments if segment.row is not None]
        sampled = iter(sample(logits, rows) if self._samples and rows else [])
        failed = self._bridge.failed
        results = []
        for segment in batch.segments:
            token = next(sampled, None) if segment.row is not None else None
            reasons = [failed[op] for op in segment.loads if op in failed]
            results.append(
                SegmentResult(failed=reasons[0]) if reasons else SegmentResult(sampled=token)
            )
        return BatchResult(batch.number, results)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """After the last token of each segment with a row: [those, vocabulary]."""
        self._bridge.forget()
        if self._states is None:
            return self._packed(batch)
        return self._in_parts(batch, self._states)

    def _packed(self, batch: Batch) -> torch.Tensor:
        tokens, positions = self._bridge.begin(batch)
        ends: list[int] = []
        end = 0
        for segment in batch.segments:
            end += segment.num_tokens
            if segment.row is not None:
                ends.append(end - 1)
        output = self._model(
            input_ids=tokens[None].to(self._device),
            position_ids=positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=torch.tensor(ends or [0], device=self._device),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _in_parts(self, batch: Batch, states: States) -> torch.Tensor:
        found: dict[int, torch.Tensor] = {}
        for members in _parts(batch):
            segments = [batch.segments[i] for i in members]
            tokens, positions = self._bridge.begin(Batch(batch.number, segments))
            shape = (len(segments), -1)  # either has one token each, or there is only one
            states.begin(segments)
            output = self._model(
                input_ids=tokens.view(shape).to(self._device),
                position_ids=positions.view(shape).to(self._device),
                past_key_values=states,
                use_cache=True,
                logits_to_keep=1,
            )
            states.finish()
            found |= zip(members, output.logits[:, -1], strict=True)
        wanted = [i for i, segment in enumerate(batch.segments) if segment.row is not None]
        return torch.stack([found[i] for i in wanted or found])


def _parts(batch: Batch) -> Iterator[list[int]]:
    """Segments that a model with recurrent layers computes together, by their places."""
    singles = [i for i, segment in enumerate(batch.segments) if segment.num_tokens == 1]
    if singles:
        yield singles
    for i, segment in enumerate(batch.segments):
        if segment.num_tokens > 1:
            yield [i]
