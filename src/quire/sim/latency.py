"""Latency: how long things take on each rank, drawn from a seeded generator.

Mostly short, sometimes a hundred times longer, rarely beyond every deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

_COPY_S = 0.02
_STORE_S = 0.02
_SLOW_FACTOR = 100.0
_STUCK_S = 150.0


class Latency:
    def __init__(
        self,
        rng: Random,
        rank_factors: Sequence[float],
        *,
        slow_share: float = 0.0,
        stuck_share: float = 0.0,
        tell: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`tell` is called with what takes unusually long."""
        self._rng = rng
        self._tell = tell
        self._rank_factors = list(rank_factors)
        self.slow_share = slow_share
        self.stuck_share = stuck_share

    def copy_s(self, rank: int) -> float:
        return self._draw(rank, _COPY_S)

    def store_s(self, rank: int) -> float:
        return self._draw(rank, _STORE_S)

    def _draw(self, rank: int, typical_s: float) -> float:
        rng = self._rng
        seconds = typical_s * self._rank_factors[rank] * rng.expovariate(1.0)
        luck = rng.random()
        if luck >= self.stuck_share + self.slow_share:
            return seconds
        is_stuck = luck < self.stuck_share
        seconds = _STUCK_S * (0.5 + rng.random()) if is_stuck else seconds * _SLOW_FACTOR
        self._tell(seconds)
        return seconds


def moments(rng: Random, whole_s: float) -> tuple[float, float]:
    """When a copy reads and when it writes: early, late or in between."""
    first = rng.choice((0.0, 1.0, rng.random()))
    second = rng.choice((0.0, 1.0, rng.random()))
    return whole_s * min(first, second), whole_s * max(first, second)
