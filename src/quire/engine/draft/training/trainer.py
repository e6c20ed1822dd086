"""Trainer: a head learns from examples, one batch a step, and goes on where it stopped.

The loss of a batch is the cross-entropy of the head's distribution against the target's over the
draft vocabulary, in each step of the unroll, later ones counting less. Tokens that the target would
choose and the draft vocabulary does not have teach nothing and are left out.

Weights are kept in float32 and cast to the target's dtype for each step. What a checkpoint holds,
and the order of batches, by seed, is all that decides how it goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from quire.engine.draft.eagle import EagleHead, EagleSpec
from quire.engine.draft.headweights import Tensors, assemble
from quire.engine.draft.training.examples import Example, Examples, Order
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.unroll import Unroll, shifted

_STEP_DECAY = 0.8
"""How much less each step of the unroll counts than the one before."""
_BETAS = (0.9, 0.95)
_MAX_NORM = 0.5
_WARMUP_SHARE = 0.03
_LEAST_RATE = 0.03
"""Of the learning rate, at the end."""


@dataclass(frozen=True, slots=True)
class Course:
    steps: int
    batch_tokens: int
    learning_rate: float
    unroll: int
    """How often the head is fed with its own output, and once more."""
    seed: int
    time_limit_s: float | None = None
    """Training ends then, if it has not before; the learning rate falls in time for it."""


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """Of one batch, on the device; each [step of the unroll]."""

    losses: torch.Tensor
    right: torch.Tensor
    """Share of rows where head and target would choose the same token."""


class Trainer:
    def __init__(
        self,
        teacher: TeacherModel,
        spec: EagleSpec,
        tensors: Tensors,
        examples: Sequence[Example],
        *,
        vocabulary: Tensors,
        course: Course,
    ) -> None:
        """`tensors`: what is learned, by name, to begin with; `vocabulary`: d2t and t2d."""
        self._teacher = teacher
        self._spec = spec
        self._vocabulary = dict(vocabulary)
        self.course = course
        self._order = Order(examples, course.batch_tokens, course.seed)
        self._learned = {
            name: tensor.to(teacher.device, torch.float32).clone().requires_grad_()
            for name, tensor in tensors.items()
        }
        self._optimizer = torch.optim.AdamW(
            self._learned.values(), lr=course.learning_rate, betas=_BETAS, weight_decay=0.0
        )
        self.step = 0
        self.history: list[dict[str, Any]] = []

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All of the head's, for saving."""
        return {n: t.detach().to(dtype) for n, t in self._learned.items()} | self._vocabulary

    def head(self) -> EagleHead:
        tensors = self._learned | self._vocabulary
        weights = assemble(self._spec, tensors, self._teacher.embedding, self._teacher.lm_head)
        return EagleHead(self._spec, weights)

    def train(
        self,
        clock: Callable[[], float],
        log_every: int,
        on_log: Callable[[dict[str, Any]], None],
        on_step: Callable[[int], None],
    ) -> None:
        """From `step` on to the end of the course, or of its time."""
        begun = clock()
        since: list[TrainingFigures] = []
        for batch in self._order.batches(self.step):
            spent_s = clock() - begun
            done = self._done(spent_s)
            if done >= 1:
                break
            for group in self._optimizer.param_groups:
                group["lr"] = self.course.learning_rate * rate(done)
            since.append(self._learn(batch))
            self.step += 1
            if self.step % log_every == 0 or self.step == self.course.steps:
                self.history.append(self._entry(since, done, spent_s))
                on_log(self.history[-1])
                since = []
            on_step(self.step)

    def _done(self, spent_s: float) -> float:
        share = self.step / self.course.steps
        limit_s = self.course.time_limit_s
        return share if limit_s is None else max(share, spent_s / limit_s)

    def _learn(self, batch: Examples) -> TrainingFigures:
        figures, loss = self.loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._learned.values(), _MAX_NORM)
        self._optimizer.step()
        return figures

    def loss(self, batch: Examples) -> tuple[TrainingFigures, torch.Tensor]:
        device, head = self._teacher.device, self.head()
        tokens = batch.tokens.to(device)
        seen = self._teacher.see(tokens, self._spec.layers)
        lessons = _Lessons(batch, seen.logits, head.proposed, self._spec.draft_vocab_size)
        losses, right = [], []
        for number, normed in Unroll(head, seen.features, tokens).steps(self.course.unroll):
            rows, places = lessons.of_step(number)
            logits = head.logits(normed.flatten(0, 1)[rows])
            wanted, counts = lessons.wanted[places], lessons.counts[places]
            each = -(wanted * functional.log_softmax(logits.float(), -1)).sum(-1)
            total = counts.sum().clamp(min=1)
            losses.append((each * counts).sum() / total)
            agreed = (logits.argmax(-1) == wanted.argmax(-1)) * counts
            right.append(agreed.sum() / total)
        weights = [_STEP_DECAY**number for number in range(len(losses))]
        parts = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        figures = TrainingFigures(torch.stack(losses).detach(), torch.stack(right))
        return figures, torch.stack(parts).sum() / sum(weights)

    def _entry(
        self, since: Sequence[TrainingFigures], done: float, spent_s: float
    ) -> dict[str, Any]:
        losses = torch.stack([figures.losses for figures in since]).mean(0)
        right = torch.stack([figures.right for figures in since]).mean(0)
        return {
            "step": self.step,
            "seconds": round(spent_s, 1),
            "rate": round(self.course.learning_rate * rate(done), 7),
            "loss": [round(value, 4) for value in losses.tolist()],
            "right": [round(value, 4) for value in right.tolist()],
        }

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        kept = {f"weight {name}": tensor.detach() for name, tensor in self._learned.items()}
        for name, tensor in self._learned.items():
            for key, value in self._optimizer.state[tensor].items():
                kept[f"{key} {name}"] = value
        part = path.with_suffix(".part")
        about = {"step": str(self.step), "history": json.dumps(self.history)}
        save_file({n: t.cpu().contiguous() for n, t in kept.items()}, str(part), metadata=about)
        part.rename(path)

    def load(self, path: Path) -> None:
        """What `save` wrote for the same course."""
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            about = file.metadata()
            kept: dict[str, dict[str, torch.Tensor]] = {}
            for entry in file.keys():  # noqa: SIM118 (no mapping: it has only keys)
                key, _, name = entry.partition(" ")
                kept.setdefault(name, {})[key] = file.get_tensor(entry)
        for name, tensor in self._learned.items():
            with torch.no_grad():
                tensor.copy_(kept[name].pop("weight"))
            # The count of steps stays on the host, where AdamW keeps it.
            self._optimizer.state[tensor] = {
                key: value if key == "step" else value.to(tensor.device)
                for key, value in kept[name].items()
            }
        self.step = int(about["step"])
        self.history = json.loads(about["history"])


class _Lessons:
    """What the target says at the places of a batch where something is to be learned.

    Place p of the batch, sequences one after another, is about the token behind it. Rows of step m
    are about place row + m + 1.
    """

    def __init__(
        self,
        batch: Examples,
        logits: torch.Tensor,
        proposed: Callable[[torch.Tensor], torch.Tensor],
        draft_vocab_size: int,
    ) -> None:
        self._is_learned = batch.is_learned
        self._device = logits.device
        places = shifted(batch.is_learned, 1).flatten().nonzero().flatten()
        self._index = torch.full((batch.tokens.numel(),), len(places))
        self._index[places] = torch.arange(len(places))
        there = logits.flatten(0, 1)[places.to(self._device)]
        members = proposed(torch.arange(draft_vocab_size, device=self._device))
        drafted = there[:, members].float()
        self.wanted = drafted.softmax(-1)
        """[place, draft vocabulary]"""
        self.counts = (drafted.max(-1).values >= there.max(-1).values.float()).float()
        """[place]: 1 where the target's choice can be proposed."""

    def of_step(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows, and the index of what they are to say."""
        rows = shifted(self._is_learned, number + 2).flatten().nonzero().flatten()
        return rows.to(self._device), self._index[rows + number + 1].to(self._device)


def rate(done: float) -> float:
    """Of the learning rate: up within the first steps, then down along a cosine."""
    if done < _WARMUP_SHARE:
        return max(done, 1e-3) / _WARMUP_SHARE
    falling = 0.5 + 0.5 * math.cos(math.pi * min(1.0, done))
    return _LEAST_RATE + (1 - _LEAST_RATE) * falling
