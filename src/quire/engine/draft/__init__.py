"""Drafts: tokens proposed before the model has computed them, for it to check several at once.

ngram.py looks them up in the request's own text; eagle.py computes them with a small head, read by
headweights.py and made by training/, and trees.py has it propose trees; adaptive.py decides how
many are worth proposing, at the prices that prices.py measures; speculation.py does so for every
request. Importing this imports no torch.
"""

from __future__ import annotations

from functools import partial

from quire.engine.draft.kinds import DraftChoice, DraftKind
from quire.engine.draft.ngram import NgramDraft
from quire.engine.draft.prices import StepPrices
from quire.engine.draft.speculation import Offered, Speculation
from quire.errors import ConfigError
from quire.models import ModelShape

__all__ = ["Speculation", "check_target", "open_speculation"]


def open_speculation(choice: DraftChoice, max_tokens: int) -> Speculation | None:
    """None: nothing is proposed."""
    if choice.kind is DraftKind.OFF:
        return None
    if choice.kind is DraftKind.NGRAM:
        return Speculation(NgramDraft, max_tokens, StepPrices())
    offered = partial(Offered, branches=choice.branches)
    return Speculation(offered, max_tokens, StepPrices(), on_ranks=True, branches=choice.branches)


def check_target(choice: DraftChoice, shape: ModelShape, *, tp: int, no_dense: str) -> None:
    """Raises ConfigError if tokens cannot be proposed for such a model. `no_dense`: why it is not
    computed by our own decoder."""
    if choice.kind is not DraftKind.OFF and shape.recurrent_layers:
        raise ConfigError(
            f"speculate is {choice.kind.value}, and {shape.architecture} has recurrent layers, "
            "whose state cannot be rolled back when a proposal is rejected: set speculate to off"
        )
    if choice.kind is not DraftKind.EAGLE:
        return
    if no_dense:
        raise ConfigError(
            "speculate is eagle, which looks into Quire's own decoder, and the model is computed "
            f"by transformers: {no_dense}; use ngram"
        )
    if choice.branches and shape.window_layers:
        raise ConfigError(
            f"speculate is eagle-tree, and {shape.architecture} has layers that see a window, for "
            "which proposals beside each other are not known: use eagle"
        )
    if tp > 1:
        raise ConfigError(
            f"speculate is eagle, and tp is {tp}: a draft head runs on one rank; use ngram"
        )
