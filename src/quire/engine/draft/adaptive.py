"""DraftLength: how many tokens to propose next for one request, from what was accepted so far.

Proposing k tokens pays while the tokens gained outweigh what the longer step costs:

    gain(k) = (1 + r₁ + r₁r₂ + … + r₁…r_k) / cost(k)        gain(0) = 1

rᵢ is the measured share of i-th proposals accepted, given that those before were; older drafts
count less and less. A position seldom tried is believed to be like the one before it. Where none
pays, nothing is proposed, except for a few drafts now and then, more and more seldom, to see if
that has changed:

    DRAFTING ──no k pays──▶ RESTING ──after `wait` steps──▶ TRYING (a few drafts)
        ▲                      ▲                              │ │
        │                      └── wait × 2 ──still no k pays─┘ │
        └────────────────────────some k pays────────────────────┘

Pure and deterministic: knows neither time nor chance. What a step costs is told by the caller, and
may differ from step to step: the same draft pays at batch 1 and not at batch 64.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95
"""Of what a draft counts, with every later one."""
_FIRST_RATE = 0.6
"""Believed of the first position before anything is known."""
_BELIEF = 2.0
"""So many drafts' worth is what is believed before."""
_MARGIN = 1.02
"""A gain below this is none: what is measured is not that exact."""
_TRIES = 4
_FIRST_WAIT, _LAST_WAIT = 16, 512


@dataclass(frozen=True, slots=True)
class DraftPrice:
    """What a step costs, as a multiple of one without a draft."""

    per_token: float
    """To propose one token and to check it."""
    fixed: float = 0.0
    """For having a draft at all."""

    def cost(self, num_tokens: float) -> float:
        return 1.0 + (self.fixed + self.per_token * num_tokens if num_tokens else 0.0)


class DraftLength:
    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= 0
        self._tries = [0.0] * max_tokens
        self._hits = [0.0] * max_tokens
        self._wait = _FIRST_WAIT
        self._rested = 0
        """Steps since resting began; meaningless while drafting."""
        self._tries_left = 0

    @property
    def rates(self) -> list[float]:
        """Believed share accepted, by position, given that those before were."""
        rates, rate = [], _FIRST_RATE
        for tries, hits in zip(self._tries, self._hits, strict=True):
            rate = (hits + _BELIEF * rate) / (tries + _BELIEF)
            rates.append(rate)
        return rates

    def best(self, price: DraftPrice) -> int:
        """The length that gains most by what is believed; 0: none pays."""
        best, most = 0, _MARGIN
        expected = reached = 1.0
        for number, rate in enumerate(self.rates, 1):
            reached *= rate
            expected += reached
            gain = expected / price.cost(number)
            if gain > most:
                best, most = number, gain
        return best

    def choose(self, price: DraftPrice) -> int:
        """For the next step, of which there is one for each call."""
        best = self.best(price)
        if best:
            self._wait, self._rested, self._tries_left = _FIRST_WAIT, 0, 0
            return best
        if self._tries_left:
            self._tries_left -= 1
            return min(1, len(self._tries))
        self._rested += 1
        if self._rested > self._wait:
            self._wait = min(2 * self._wait, _LAST_WAIT)
            self._rested = 0
            self._tries_left = _TRIES - 1
            return min(1, len(self._tries))
        return 0

    def saw(self, num_proposed: int, num_accepted: int) -> None:
        """What became of a draft. One without a token tells nothing."""
        assert 0 <= num_accepted <= num_proposed <= len(self._tries)
        for position in range(min(num_accepted + 1, num_proposed)):
            self._tries[position] = self._tries[position] * _DECAY + 1.0
            self._hits[position] = self._hits[position] * _DECAY + (position < num_accepted)
