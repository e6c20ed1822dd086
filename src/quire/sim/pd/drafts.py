"""Drafts of a simulated engine: proposals by chance, so that some are right and most are not.

Knows tokens and chance; what is accepted is the model's (model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from quire.engine.draft.adaptive import DraftPrice
from quire.engine.draft.speculation import Offered, Speculation
from quire.keys import UnitKind
from quire.sim.workload import ALPHABET


def speculation(rng: Random, max_tokens: int, unit: UnitKind) -> Speculation | None:
    """None: nothing is proposed. With pairs there is always a draft head, which may propose nothing
    for as long as it likes."""
    on_ranks = unit is UnitKind.PAIR
    if not max_tokens and not on_ranks:
        return None
    chance = _Chance(rng, max_tokens)
    proposer = Offered if on_ranks else lambda _tokens: chance
    return Speculation(proposer, max_tokens, chance, on_ranks, lambda _most: chance)


@dataclass(slots=True)
class _Chance:
    """Proposer, length and prices of all requests: none of them remembers anything."""

    rng: Random
    max_tokens: int

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, max_tokens: int) -> list[int]:
        return [self.rng.randrange(ALPHABET) for _ in range(max_tokens)]

    def choose(self, price: DraftPrice) -> int:
        return self.rng.randrange(self.max_tokens + 1)

    def saw(self, num_proposed: int, num_accepted: int) -> None:
        pass

    def price(self, num_requests: int) -> DraftPrice | None:
        return DraftPrice(0.0) if self.rng.random() < 0.9 else None

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        pass
