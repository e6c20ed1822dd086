"""Proposers that are right, wrong or half right, as a test likes. And prices that are fixed."""

from collections.abc import Callable, Sequence

from quire.engine.draft.adaptive import DraftPrice
from quire.engine.draft.speculation import Speculation

Answers = Callable[[Sequence[int], int], list[int]]
"""What comes after these tokens, so many."""


class FixedPrices:
    """Always worth it, or never."""

    def __init__(self, price: DraftPrice | None = None) -> None:
        self._price = price or DraftPrice(per_token=0.0)

    def price(self, num_requests: int) -> DraftPrice:
        return self._price

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        pass


class Oracle:
    """Knows what will come, and says as much of it as `plan` tells: of its n-th proposal the first
    plan[n] tokens are right and the others wrong; the plan begins again when it is over."""

    def __init__(self, tokens, answers: Answers, plan: Sequence[int], vocabulary: int) -> None:
        self._tokens = [int(token) for token in tokens]
        self._answers = answers
        self._plan = plan
        self._vocabulary = vocabulary
        self._number = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, max_tokens: int) -> list[int]:
        if not max_tokens:
            return []
        right = self._plan[self._number % len(self._plan)]
        self._number += 1
        if right < 0:
            return []
        coming = self._answers(self._tokens, max_tokens)
        return [
            token if i < right else (token + 1 + i) % self._vocabulary
            for i, token in enumerate(coming)
        ]


class Eager:
    """As many as there may be, whatever became of those before."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def choose(self, price: DraftPrice) -> int:
        return self._max_tokens

    def saw(self, num_proposed: int, num_accepted: int) -> None:
        pass


def speculation(
    answers: Answers, max_tokens: int, plan: Sequence[int], vocabulary: int
) -> Speculation:
    return Speculation(
        lambda tokens: Oracle(tokens, answers, plan, vocabulary),
        max_tokens,
        FixedPrices(),
        new_length=Eager,
    )
