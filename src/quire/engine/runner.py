"""ModelRunner: one rank's model, run over batches; from its logits to tokens.

It knows neither the model nor its pages: see forward/. Sampling is done here, where the logits are.
"""

from __future__ import annotations

import torch

from quire.engine.batch import Batch, BatchResult, SegmentResult
from quire.engine.forward.base import Forward
from quire.engine.sampling import sample


class ModelRunner:
    def __init__(self, forward: Forward, *, samples: bool = True) -> None:
        """`samples`: this rank picks the tokens."""
        self._forward = forward
        self._samples = samples

    @torch.inference_mode()
    def run(self, batch: Batch) -> BatchResult:
        logits = self._forward.logits(batch)
        rows = [segment.row for segment in batch.segments if segment.row is not None]
        sampled = iter(sample(logits, rows) if self._samples and rows else [])
        failed = self._forward.failed
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
        """As of Forward: before anything is sampled."""
        return self._forward.logits(batch)
