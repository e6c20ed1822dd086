"""What is drawn and by whom: rows, results, samplers. Knows no way to draw.

A token is a function of its row's logits, parameters, histories and position alone: not of the
other rows, of the device, or of what was drawn before. So a request that was preempted, or whose
beginning came from the cache, goes on as if it had not been.

Per row, in this order:

    raw logits → what the grammar allows → + logit_bias
      → repetition penalty → − presence and frequency penalties
      temperature 0:  the likeliest, the lowest id among equals
      else:           ÷ temperature → top_k → top_p → min_p → draw

top_p looks at what top_k left, renormalised. The draw inverts the cumulative distribution over
tokens by falling logit and, among equals, rising id, in double precision. Every filter keeps a
prefix of the tokens in this order. Log probabilities are those of the raw logits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.engine.messages import SamplingParams, TokenLogprobs
from quire.types import RequestId

if TYPE_CHECKING:
    import torch

NOT_FINITE = "the model computed logits that are not finite"
_GREEDY_BELOW = 1e-5
"""Temperatures this low leave one token anyway, and overflow on the way there."""


class Row(msgspec.Struct, frozen=True):
    """How to pick the token after one sequence."""

    params: SamplingParams
    position: int
    """Of the token to pick, in the output: 0 for the first."""
    prompt: bytes = b""
    """Token ids, int32; with `output`, given when `needs_history`."""
    output: bytes = b""
    """A sampler takes it without its very last token too, if that is of the draw before."""

    allowed: bytes = b""
    """A bit per token, lowest first: may it be drawn? Those it does not reach may not. Empty: all
    may."""

    @property
    def lacks_last(self) -> bool:
        """Whether `output`, where it is needed, ends one token too early."""
        return len(self.output) // 4 < self.position


class Sampled(msgspec.Struct, frozen=True):
    token: int
    logprobs: TokenLogprobs | None = None
    """If the row asked for them."""
    error: str = ""
    """The row's logits are unusable; the token means nothing."""


def told(chosen: float, likeliest: Iterable[tuple[float, float]], base: float) -> TokenLogprobs:
    """Of the chosen token's logit, tokens with theirs by falling logit, and the logarithm of the
    sum of all weights. A token that cannot be drawn is none of the likeliest, however few are."""
    top = [(int(token), logit - base) for token, logit in likeliest if logit != -math.inf]
    return TokenLogprobs(chosen - base, [token for token, _ in top], [value for _, value in top])


class Drawn(Protocol):
    """Tokens that were drawn, or are being drawn on the device."""

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [rows], on the device of the logits; some token where there was an error."""

    def collect(self) -> list[Sampled]:
        """Wait for this draw, not for what the device was given since."""


class Sampler(Protocol):
    """Draws for the requests of one engine; remembers their histories between draws."""

    def draw(self, logits: torch.Tensor, rows: Sequence[Row], ids: Sequence[RequestId]) -> Drawn:
        """One token per row of `logits` [rows, vocabulary], any float type; not changed.

        A row without a finite maximum (NaN, overflow, everything masked) gets an error of its own.
        """


def needs_history(params: SamplingParams) -> bool:
    """Whether a row with these parameters must carry `prompt` and `output`."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < _GREEDY_BELOW


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 bits, from nothing but these two."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53
