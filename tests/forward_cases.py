"""What any forward must do, beside transformers' own model: on a CPU and on CUDA.

`close(found, expected)` says how near logits must be.
"""

from collections.abc import Callable
from collections.abc import Sequence as Several
from pathlib import Path

import numpy as np
import torch

from quire.engine.config import ForwardKind
from unit.engine.hybrid_rank import PAGE, Hybrid, Sequence, build, poison

LENGTH = 90
"""Tokens: several windows."""
PIECES = [(LENGTH,), (32,), (7,), (1,), (40, 1, 1, 3)]
"""Sizes in which they are computed, again and again."""

Close = Callable[[torch.Tensor, torch.Tensor], None]


def check_pieces(model: Hybrid, sizes: Several[int], close: Close) -> None:
    sequence = Sequence(model, model.tokens(LENGTH))
    expected = model.expected(sequence.tokens)
    number = 0
    while sequence.done < LENGTH:
        size = min(sizes[number % len(sizes)], LENGTH - sequence.done)
        (logits,) = model.run(sequence.segment(size))
        close(logits, expected[sequence.done - 1])
        number += 1


def check_greedy(model: Hybrid, length: int) -> None:
    """After so many tokens those that follow are those of transformers, and vary."""
    sequence = Sequence(model, model.tokens(length))
    (logits,) = model.run(sequence.segment(length))
    for _ in range(30):
        sequence.tokens.append(int(logits.argmax()))
        (logits,) = model.run(sequence.segment(1))
    answer = sequence.tokens[length:]
    assert answer == model.expected(sequence.tokens)[length - 1 : -1].argmax(-1).tolist()
    assert len(set(answer)) > 3


def check_mixed(model: Hybrid, close: Close) -> None:
    """Decodes, pieces of prompts and continued prefixes in one batch."""
    first = Sequence(model, model.tokens(LENGTH, seed=1), slot=0)
    second = Sequence(model, model.tokens(LENGTH, seed=2), slot=1)
    model.run(first.segment(40), second.segment(61))
    branch = first.branch(model.tokens(33, seed=3), slot=2)  # whose window goes on, not first's
    new = Sequence(model, model.tokens(17, seed=4), slot=3)
    for sizes in ([1, 30, 16], [9, 1, 1], [1, 1, 0], [1, 1, 0]):
        running = [(s, n) for s, n in zip([second, branch, new], sizes, strict=True) if n]
        logits = model.run(*(sequence.segment(size) for sequence, size in running))
        for found, (sequence, _) in zip(logits, running, strict=True):
            close(found, model.expected(sequence.tokens[: sequence.done])[-1])


def check_half(
    directory: Path, truth: Hybrid, dtype: str, *, device: str = "cpu", graph_batch: int = 0
) -> None:
    """The rule: the error against float32 is at most one and a half times that of transformers'
    modules in the same dtype, over all tokens of a text; fed page by page, then token by token."""
    tokens = truth.tokens(LENGTH)
    expected = truth.expected(tokens)
    sizes = [PAGE] * (LENGTH // PAGE // 2)
    sizes += [1] * (LENGTH - sum(sizes))
    errors = {}
    for kind in (ForwardKind.DENSE, ForwardKind.TRANSFORMERS):
        graphs = graph_batch if kind is ForwardKind.DENSE else 0
        rank = build(directory, forward=kind, dtype=dtype, device=device, graph_batch=graphs)
        poison(rank)
        half = Hybrid(rank, None)
        sequence = Sequence(half, tokens)
        found = torch.cat([half.run(sequence.segment(size)).cpu() for size in sizes])
        ends = np.cumsum(sizes) - 1
        errors[kind] = (found.float() - expected[ends]).square().mean().sqrt()
        rank.close()
    print(f"{directory.name} {dtype}: {errors}")
    assert errors[ForwardKind.DENSE] <= 1.5 * errors[ForwardKind.TRANSFORMERS]
