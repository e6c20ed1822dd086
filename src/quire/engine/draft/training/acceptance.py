"""How many proposals are accepted: chains drafted at every token of the model's own answers.

The answers are greedy, so a proposal is accepted if and only if it is the token that stands there.
Every token of an answer is drafted from at once; walking along what was accepted then gives what an
engine would have seen:

    round    ├─ accepted a ─┤+1├─ a' ─┤+1├─ …      acceptance length: tokens per round, 1 … k + 1
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from quire.engine.draft.eagle import EagleHead
from quire.engine.draft.training.examples import Examples
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.unroll import Unroll, shifted


@dataclass(slots=True)
class Acceptance:
    """Of chains of up to so many tokens; index k - 1 is about chains of k."""

    max_tokens: int
    num_drafted: int = 0
    """Tokens drafted from."""
    accepted: list[int] = field(default_factory=list)
    """At how many of these the first k proposals were right."""
    num_rounds: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.max_tokens
        self.num_rounds = self.num_rounds or [0] * self.max_tokens
        self.num_tokens = self.num_tokens or [0] * self.max_tokens

    def add(self, right: list[int]) -> None:
        """`right`: how many proposals in a row were right, from each token of one answer on."""
        self.num_drafted += len(right)
        for k in range(1, self.max_tokens + 1):
            self.accepted[k - 1] += sum(run >= k for run in right)
            at = 0
            while at < len(right):
                gained = min(right[at], k) + 1
                at += gained
                self.num_rounds[k - 1] += 1
                self.num_tokens[k - 1] += gained

    def as_dict(self) -> dict[str, object]:
        drafted = max(1, self.num_drafted)
        by_position = [
            round(now / max(1, before), 4)
            for before, now in zip([self.num_drafted, *self.accepted], self.accepted, strict=False)
        ]
        return {
            "tokens": self.num_drafted,
            "first_k_right": [round(count / drafted, 4) for count in self.accepted],
            "by_position": by_position,
            "length": [
                round(tokens / max(1, rounds), 4)
                for tokens, rounds in zip(self.num_tokens, self.num_rounds, strict=True)
            ],
        }


@torch.no_grad()
def measure(
    head: EagleHead, teacher: TeacherModel, batches: Iterable[Examples], max_tokens: int
) -> dict[str, Acceptance]:
    """By source, and of all of them under "all". The batches hold greedy answers."""
    results = {"all": Acceptance(max_tokens)}
    for batch in batches:
        tokens = batch.tokens.to(teacher.device)
        seen = teacher.see(tokens, head.spec.layers)
        right = _right(head, seen.features, tokens, max_tokens).cpu()
        # From row i on, token i + 2 is the first to be proposed.
        is_drafted = shifted(batch.is_learned, 2)
        room = _room(batch.is_learned)
        for row, source in enumerate(batch.sources):
            own = is_drafted[row].nonzero().flatten()
            runs = torch.minimum(right[row], room[row])[own].tolist()
            results.setdefault(source, Acceptance(max_tokens)).add(runs)
            results["all"].add(runs)
    return results


def _right(
    head: EagleHead, features: torch.Tensor, tokens: torch.Tensor, max_tokens: int
) -> torch.Tensor:
    """[sequence, token]: how many of the tokens proposed there are those that stand there."""
    unroll = Unroll(head, features, tokens)
    next_tokens = shifted(tokens, 1)
    still = torch.ones_like(tokens, dtype=torch.bool)
    right = torch.zeros_like(tokens)
    for number in range(max_tokens):
        normed = unroll.step(number, next_tokens)
        next_tokens = head.proposed(head.logits(normed).argmax(-1))
        still &= next_tokens == shifted(tokens, number + 2)
        right += still
    return right


def _room(is_learned: torch.Tensor) -> torch.Tensor:
    """[sequence, token]: how many tokens of the answer there are from two places later on."""
    ends = is_learned.shape[1] - is_learned.flip(1).int().argmax(1)  # just behind the last one
    places = torch.arange(is_learned.shape[1])
    return (ends[:, None] - places - 2).clamp(min=0)
