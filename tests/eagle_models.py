"""Draft heads of random weights for tiny models, and what they must propose, by another way.

`chain` computes a head over the whole text each time, through transformers and the trainer's own
unrolling: it knows no page and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from quire.engine.branches import joined, num_levels
from quire.engine.draft.eagle import EagleHead
from quire.engine.draft.headweights import assemble, read_spec, read_tensors, save_head
from quire.engine.draft.speculation import Offered, Speculation
from quire.engine.draft.training.start import first_weights, new_spec, positions_of, vocabulary_of
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.unroll import Unroll
from speculating import Eager, FixedPrices


def teacher_of(model: Path) -> TeacherModel:
    return TeacherModel(model, dtype=torch.float32, device=torch.device("cpu"))


def write_head(
    teacher: TeacherModel,
    path: Path,
    *,
    layers: tuple[int, int, int] = (0, 1, 1),
    num_draft_tokens: int | None = None,
    seed: int = 1,
) -> Path:
    """What it proposes hangs on all that it attends to."""
    vocabulary = teacher.shape.vocab_size
    spec = new_spec(teacher, layers, 48, num_draft_tokens or vocabulary)
    tokens = torch.arange(vocabulary)[-spec.draft_vocab_size :]
    weights = first_weights(teacher, spec, tokens, own_lm_head=False, seed=seed)
    for name, tensor in weights.items():
        if "_proj" in name:
            weights[name] = tensor / tensor.std() * 0.2
    save_head(path, spec, weights | vocabulary_of(spec, tokens), positions_of(teacher))
    return path


def read_head(teacher: TeacherModel, path: Path) -> EagleHead:
    spec = read_spec(path, teacher.shape)
    tensors = read_tensors(path, spec)
    return EagleHead(spec, assemble(spec, tensors, teacher.embedding, teacher.lm_head))


@torch.no_grad()
def chain(teacher: TeacherModel, head: EagleHead, tokens: Sequence[int], count: int) -> list[int]:
    """What it proposes to come after these tokens, so many."""
    seen = teacher.see(torch.tensor([tokens[:-1]]), head.spec.layers)
    unroll = Unroll(head, seen.features, torch.tensor([tokens[:-1]]))
    next_tokens = torch.tensor([tokens[1:]])
    proposed: list[int] = []
    for number in range(count):
        normed = unroll.step(number, next_tokens)
        next_tokens = head.proposed(head.logits(normed).argmax(-1))
        proposed.append(int(next_tokens[0, -1]))
    return proposed


class Watching(Speculation):
    """Every proposal is kept, with the text that it was made for."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(Offered, max_tokens, FixedPrices(), on_ranks=True, new_length=Eager)
        self.seen: list[tuple[list[int], list[int]]] = []

    def offer(self, request, tokens) -> None:
        self.seen.append((request.tokens[: request.length].tolist(), tokens))
        super().offer(request, tokens)

    def check(self, chain_of: Callable[[list[int], int], list[int]]) -> None:
        """All that were made since the last check are the head's own."""
        seen, self.seen = self.seen, []
        made = [(text, tokens) for text, tokens in seen if tokens]
        assert made, "nothing was proposed"
        for text, tokens in made:
            assert tokens == chain_of(text, len(tokens)), f"after {len(text)} tokens"


_PLAN = ["tb", "b", "ttt", "ttb", "x", "txt", "own"]
"""Of the n-th tree: level by level, right in the trunk, in the branch, or nowhere."""


class Branching(Watching):
    """Keeps the head's own trees, and gives out others, made of what it knows to come."""

    def __init__(
        self, levels: int, answers: dict[tuple[int, ...], list[int]], vocabulary: int
    ) -> None:
        super().__init__(levels)
        self._vocabulary = vocabulary
        self.branches = 1
        self.new_proposer = partial(Offered, branches=1)
        self._answers = answers
        self._number = 0

    def offer(self, request, tokens) -> None:
        super().offer(request, tokens)
        plan = _PLAN[self._number % len(_PLAN)]
        self._number += 1
        text = request.tokens[: request.length].tolist()
        if tokens and plan != "own":
            levels = num_levels(len(tokens), 1)
            self._draft_of(request).proposer.offer(self._tree(text, plan, levels))

    def _tree(self, text: list[int], plan: str, levels: int) -> list[int]:
        coming = next(
            ([*prompt, *answer][len(text) :] for prompt, answer in self._answers.items()
             if [*prompt, *answer][: len(text)] == text), []
        )  # fmt: skip
        trunk, beside = [], []
        for level in range(levels):
            right = coming[level] if level < len(coming) else 0
            wrong = (right + 1) % self._vocabulary
            way = plan[level] if level < len(plan) else "x"
            trunk.append(right if way == "t" else wrong)
            beside.append([right if way == "b" else (right + 2) % self._vocabulary])
        return joined(trunk, beside)
