"""Conversations that grow turn by turn, the same for every side of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. Lengths in tokens."""

    sessions: int = 6
    shortest: int = 8_000
    """First prompt of the first session."""
    longest: int = 29_500
    """First prompt of the last one; those between grow by equal factors."""
    turns: int = 5
    added: int = 500
    """New tokens of each further turn, beside the answer before. In the published Mooncake
    conversation trace, requests of 8,000 to 32,000 tokens of which more than half was seen before
    have 800 new ones (median, counted in blocks of 512)."""
    answer: int = 64
    at_once: int = 4
    """Sessions that ask at the same time."""
    vocabulary: int = 150_000
    seed: int = 0


@dataclass(slots=True)
class Session:
    number: int
    tokens: npt.NDArray[np.int32]
    added: list[npt.NDArray[np.int32]] = field(default_factory=list)

    def grow(self, answer: list[int], turn: int) -> None:
        said = np.asarray(answer, dtype="<i4")
        self.tokens = np.concatenate([self.tokens, said, self.added[turn]])


def sessions(plan: Plan) -> list[Session]:
    rng = np.random.default_rng(plan.seed)

    def words(count: int) -> npt.NDArray[np.int32]:
        return rng.integers(3, plan.vocabulary, count).astype("<i4")

    lengths = np.geomspace(plan.shortest, plan.longest, plan.sessions).round().astype(int)
    return [
        Session(number, words(int(length)), [words(plan.added) for _ in range(plan.turns)])
        for number, length in enumerate(lengths)
    ]
