"""ModelRunner: one rank's model, run over batches; from its logits to tokens.

It knows neither the model nor its pages: see forward/. Sampling is done here, where the logits are.
A batch is launched and later collected. On an accelerator nothing is waited for in between: the
tokens that one batch draws stay on the device, where the next one finds them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import islice

import msgspec
import torch

from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult, verified
from quire.engine.branches import ancestors
from quire.engine.draft.drafter import Drafted, Drafts
from quire.engine.forward.base import Forward
from quire.engine.sampling import Drawn, Row, Sampler, needs_history
from quire.types import OperationId, RequestId


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that was launched."""

    batch: Batch
    drawn: Drawn | None
    """None: nothing is drawn, or not on this rank."""
    failed: dict[OperationId, str]
    """Loads that did not arrive for it, and why."""
    end: torch.cuda.Event | None
    drafted: Drafted | None = None
    """What a draft head has done with it."""

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
            own = list(islice(sampled, segment.num_rows))
            reasons = [self.failed[op] for op in segment.loads if op in self.failed]
            if reasons:
                results.append(SegmentResult(failed=reasons[0]))
            else:
                results.append(verified(segment, own) if own else SegmentResult())
        for i, tokens in (self.drafted.proposals(results) if self.drafted else {}).items():
            results[i] = msgspec.structs.replace(results[i], proposed=tokens)
        return BatchResult(self.batch.number, results)


class ModelRunner:
    def __init__(
        self, forward: Forward, sampler: Sampler | None, drafter: Drafts | None = None
    ) -> None:
        """`sampler`: on the rank that picks the tokens. `drafter`: of a head, if there is one."""
        self._forward = forward
        self._drafter = drafter
        self._sampler = sampler
        self._drawn: torch.Tensor | None = None
        """By the last batch launched, on the device."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Flight:
        logits = self._forward.logits(batch, self._drawn)
        drawn = None
        if self._sampler is not None:
            rows, ids = _draws(batch)
            if rows:
                drawn = self._sampler.draw(logits, rows, ids)
        self._drawn = drawn.tokens if drawn is not None else None
        drafted = None
        if self._drafter is not None:
            drafted = self._drafter.follow(batch, self._forward.features, self._drawn)
        end = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
        return Flight(batch, drawn, dict(self._forward.failed), end, drafted)

    def run(self, batch: Batch) -> BatchResult:
        """Launch it, and wait for it."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def logits(self, batch: Batch) -> torch.Tensor:
        """As of Forward: before anything is sampled."""
        return self._forward.logits(batch)


def _draws(batch: Batch) -> tuple[list[Row], list[RequestId]]:
    """Every token to draw, and for whom: a draw after a proposal has a name of its own, since what
    the sampler remembers by name must be what was kept."""
    rows: list[Row] = []
    ids: list[RequestId] = []
    for segment in batch.segments:
        if segment.row is None:
            continue
        rows.append(segment.row)
        ids.append(segment.id)
        if segment.drafts:
            rows += _rows_after(segment, segment.row)
            first = segment.row.position
            ids += [RequestId(f"{segment.id}+{first + i}") for i in range(1, segment.num_rows)]
    return rows, ids


def _rows_after(segment: Segment, row: Row) -> list[Row]:
    """As if the proposals had been drawn: penalties see those before each draw."""
    tokens = array("i", segment.proposed)
    allowed = segment.allowed or [b""] * segment.drafts
    rows = []
    for number, above in enumerate(ancestors(segment.drafts, segment.branches)):
        output = row.output
        if needs_history(row.params):
            output += array("i", [tokens[n] for n in (*above, number)]).tobytes()
        position = row.position + len(above) + 1
        rows.append(
            msgspec.structs.replace(row, position=position, output=output, allowed=allowed[number])
        )
    return rows
