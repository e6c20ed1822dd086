"""What a model is to the engine: from a batch to logits, with its keys and values in the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from quire.engine.batch import Batch
from quire.engine.bridge import Inputs
from quire.types import OperationId


class Forward(Protocol):
    """One rank's share of a model, its weights loaded and its attention on the pages."""

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """After the last token of each segment with a row: [those, vocabulary]; of a batch
        without any, whatever. On all ranks alike.

        `drawn` [rows of the batch before], int64, on the device: see Segment.follows. On CUDA the
        work is launched, and nothing waits for it; what is returned may be overwritten by the next
        call's work.
        """

    @property
    def features(self) -> torch.Tensor:
        """Outputs of the layers that are tapped, side by side, for every token of the last batch:
        [row, layers × hidden]. Overwritten by the next call's work."""

    @property
    def failed(self) -> Mapping[OperationId, str]:
        """Loads that did not arrive for the last batch, and why."""


class Capturable(Forward, Protocol):
    """Work on so many tokens is always the same kernels, on memory that stays where it is."""

    @property
    def packs(self) -> bool:
        """It takes any tokens of any sequences; else one token each, and their state slots."""

    def new_logits(self, num_rows: int) -> torch.Tensor:
        """Room for the logits of so many."""

    def after_replay(self, num_tokens: int) -> None:
        """Work on so many has been replayed."""

    def compute(self, inputs: Inputs, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of a batch for which the bridge has been prepared; into `out`, if there is one."""
