"""Told: an answer that is given beforehand, token by token: for what the model thinks of it.

    given    g0 g1 … gm          the only token that may be drawn at each place
    answer   g0 g1 … gm │ …      behind them the request draws as any other

Log probabilities are those of raw logits, so that those of a text are had by having it drawn. Since
all of it is known, many tokens are proposed at once, and all of them are right. Stands where a
grammar's place does (held.py). Knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_AT_ONCE = 32
"""Tokens proposed in one step, for all who are told: the logits of each are in memory together."""


class Told:
    def __init__(self, given: Sequence[int]) -> None:
        self._given = list(given)
        self._place = 0

    @property
    def error(self) -> str:
        return ""

    def advance(self, token: int) -> bool:
        is_right = self._place >= len(self._given) or token == self._given[self._place]
        self._place += 1
        return is_right

    def fitting(self, proposed: list[int]) -> list[int]:
        given = self._given[self._place :]
        for count, (token, right) in enumerate(zip(proposed, given, strict=False)):
            if token != right:
                return proposed[:count]
        return proposed

    def coming(self) -> list[int]:
        """What to propose: behind them one more token is drawn, of those that are given too."""
        return self._given[self._place : len(self._given) - 1][:MAX_AT_ONCE]

    def allowed(self, proposed: Sequence[int] = ()) -> list[bytes]:
        """One bit per token, as far as the last that may come, for the next place and behind each
        of `proposed`. Empty where all may come."""
        return [self._mask(self._place + i) for i in range(1 + len(proposed))]

    def _mask(self, place: int) -> bytes:
        if place >= len(self._given):
            return b""
        token = self._given[place]
        return bytes(token >> 3) + bytes([1 << (token & 7)])
