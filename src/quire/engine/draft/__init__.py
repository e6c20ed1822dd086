"""Drafts: tokens proposed before the model has computed them, for it to check several at once.

ngram.py looks them up in the request's own text; eagle.py computes them with a small head, read by
weights.py and made by training/; adaptive.py decides how many are worth proposing, at the prices
that prices.py measures; speculation.py does so for every request. Importing this imports no torch.
"""

from __future__ import annotations

from quire.engine.draft.kinds import DraftChoice, DraftKind
from quire.engine.draft.ngram import NgramDraft
from quire.engine.draft.prices import StepPrices
from quire.engine.draft.speculation import Speculation
from quire.errors import ConfigError
from quire.models import ModelShape

__all__ = ["Speculation", "check_target", "open_speculation"]


def open_speculation(choice: DraftChoice, max_tokens: int) -> Speculation | None:
    """None: nothing is proposed."""
    if choice.kind is DraftKind.OFF:
        return None
    return Speculation(NgramDraft, max_tokens, StepPrices())


def check_target(choice: DraftChoice, shape: ModelShape) -> None:
    """Raises ConfigError if tokens cannot be proposed for such a model."""
    if choice.kind is not DraftKind.OFF and shape.recurrent_layers:
        raise ConfigError(
            f"speculate is {choice.kind.value}, and {shape.architecture} has recurrent layers, "
            "whose state cannot be rolled back when a proposal is rejected: set speculate to off"
        )
