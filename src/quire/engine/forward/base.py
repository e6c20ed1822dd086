"""What a model is to the engine: from a batch to logits, with its keys and values in the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from quire.engine.batch import Batch
from quire.types import OperationId


class Forward(Protocol):
    """One rank's share of a model, its weights loaded and its attention on the pages."""

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """`drawn`: what the batch before drew; see Segment.follows.
        After the last token of each segment with a row: [those, vocabulary]; of a batch
        without any, whatever. On all ranks alike."""

    @property
    def failed(self) -> Mapping[OperationId, str]:
        """Loads that did not arrive for the last batch, and why."""


def row_ends(batch: Batch) -> list[int]:
    """The last token's place of each segment with a row, in the packed row of the batch."""
    ends: list[int] = []
    end = 0
    for segment in batch.segments:
        end += segment.num_tokens
        if segment.row is not None:
            ends.append(end - 1)
    return ends
