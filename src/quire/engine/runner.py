"""ModelRunner: one rank's model, run over batches; from its logits to tokens.

It knows neither the model nor its pages: see forward/. Sampling is done here, where the logits are.
A batch is launched and later collected. On an accelerator nothing is waited for in between: the
tokens that one batch draws stay on the device, where the next one finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.engine.batch import Batch, BatchResult, SegmentResult
from quire.engine.forward.base import Forward
from quire.engine.sampling import Drawn, Sampler
from quire.types import OperationId


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that was launched."""

    batch: Batch
    drawn: Drawn | None
    """None: nothing is drawn, or not on this rank."""
    failed: dict[OperationId, str]
    """Loads that did not arrive for it, and why."""
    end: torch.cuda.Event | None

    @property
    def is_over(self) -> bool:
        """Asks the device, without waiting."""
        return self.end is None or bool(self.end.query())  # type: ignore[no-untyped-call]

    def collect(self) -> BatchResult:
        """Wait for all of it."""
        if self.end is not None:
            self.end.synchronize()
        sampled = iter(self.drawn.collect() if self.drawn is not None else [])
        results = []
        for segment in self.batch.segments:
            token = next(sampled, None) if segment.row is not None else None
            reasons = [self.failed[op] for op in segment.loads if op in self.failed]
            results.append(
                SegmentResult(failed=reasons[0]) if reasons else SegmentResult(sampled=token)
            )
        return BatchResult(self.batch.number, results)


class ModelRunner:
    def __init__(self, forward: Forward, sampler: Sampler | None) -> None:
        """`sampler`: on the rank that picks the tokens."""
        self._forward = forward
        self._sampler = sampler
        self._drawn: torch.Tensor | None = None
        """By the last batch launched, on the device."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        logits = self._forward.logits(batch, self._drawn)
        picks = [segment for segment in batch.segments if segment.row is not None]
        drawn = None
        if self._sampler is not None and picks:
            rows = [segment.row for segment in picks if segment.row is not None]
            drawn = self._sampler.draw(logits, rows, [segment.id for segment in picks])
        self._drawn = drawn.tokens if drawn is not None else None
        end = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
        return Flight(batch, drawn, dict(self._forward.failed), end)

    def run(self, batch: Batch) -> BatchResult:
        """Launch it, and wait for it."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """As of Forward: before anything is sampled."""
        return self._forward.logits(batch)
