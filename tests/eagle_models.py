"""Draft heads of random weights for tiny models, and what they must propose, by another way.

`chain` computes a head over the whole text each time, through transformers and the trainer's own
unrolling: it knows no page and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from quire.engine.draft.eagle import EagleHead
from quire.engine.draft.training.start import first_weights, new_spec, positions_of, vocabulary_of
from quire.engine.draft.training.target import TeacherModel
from quire.engine.draft.training.unroll import Unroll
from quire.engine.draft.weights import assemble, read_spec, read_tensors, save_head


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
