"""Examples: token sequences to learn from, and batches of them in an order that a seed decides.

    tokens   [ ········ prompt ········ | ···· what is learned ···· )
             0                        start                     length

A batch has sequences of similar length, padded behind: causal attention does not see the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Batches are padded to one of these."""


@dataclass(frozen=True, slots=True)
class Example:
    tokens: torch.Tensor
    """[length], int32"""
    start: int
    """The first token to be predicted: all from here on are."""
    source: str


@dataclass(frozen=True, slots=True)
class Examples:
    """Each [sequence, token], on the host."""

    tokens: torch.Tensor
    """int64"""
    is_learned: torch.Tensor
    """bool: this token is to be predicted."""
    sources: tuple[str, ...]


class Order:
    """Which examples are in which batch, epoch after epoch."""

    def __init__(self, examples: Sequence[Example], batch_tokens: int, seed: int) -> None:
        self._examples = examples
        self._batch_tokens = batch_tokens
        self._seed = seed

    def batches(self, first: int) -> Iterator[Examples]:
        """From batch number `first` on, without end: the same ones whoever asks."""
        epoch = number = 0
        while True:
            for group in self._epoch(epoch):
                if number >= first:
                    yield padded([self._examples[index] for index in group])
                number += 1
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        by_length: dict[int, list[int]] = {}
        for index in torch.randperm(len(self._examples), generator=chance).tolist():
            by_length.setdefault(_room(len(self._examples[index].tokens)), []).append(index)
        groups = []
        for length, indices in by_length.items():
            size = max(1, self._batch_tokens // length)
            groups += [indices[at : at + size] for at in range(0, len(indices), size)]
        return [groups[i] for i in torch.randperm(len(groups), generator=chance).tolist()]


def in_batches(examples: Sequence[Example], batch_tokens: int) -> Iterator[Examples]:
    """All of them once, short ones first."""
    left = sorted(examples, key=lambda example: len(example.tokens))
    while left:
        size = max(1, batch_tokens // _room(len(left[0].tokens)))
        size = max(1, min(size, batch_tokens // _room(len(left[min(size, len(left)) - 1].tokens))))
        yield padded(left[:size])
        left = left[size:]


def padded(examples: Sequence[Example]) -> Examples:
    length = _room(max(len(example.tokens) for example in examples))
    tokens = torch.zeros((len(examples), length), dtype=torch.int64)
    is_learned = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        size = len(example.tokens)
        tokens[row, :size] = example.tokens
        is_learned[row, example.start : size] = True
    return Examples(tokens, is_learned, tuple(example.source for example in examples))


def save_examples(path: Path, examples: Sequence[Example]) -> None:
    from safetensors.torch import save_file

    names = sorted({example.source for example in examples})
    part = path.with_suffix(".part")
    save_file(
        {
            "tokens": torch.cat([example.tokens for example in examples]),
            "lengths": torch.tensor([len(example.tokens) for example in examples]),
            "starts": torch.tensor([example.start for example in examples]),
            "sources": torch.tensor([names.index(example.source) for example in examples]),
        },
        str(part),
        metadata={"sources": "\n".join(names)},
    )
    part.rename(path)


def load_examples(path: Path) -> list[Example]:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        names = file.metadata()["sources"].split("\n")
        lengths = file.get_tensor("lengths").tolist()
        pieces = file.get_tensor("tokens").split(lengths)
        starts, sources = file.get_tensor("starts").tolist(), file.get_tensor("sources").tolist()
    return [
        Example(tokens, start, names[source])
        for tokens, start, source in zip(pieces, starts, sources, strict=True)
    ]


def _room(length: int) -> int:
    return next((room for room in _LENGTHS if length <= room), length)
