"""The head over whole sequences, fed with its own output: what it will see when it drafts.

In step m, row i stands for the draft m tokens beyond what the target knows at position i:

    step   position   hidden                   next token          predicts token
    0      i          fc(features i)           i + 1               i + 2
    m      i + m      the row's output of m-1  i + m + 1, or the   i + m + 2
                                               one proposed

It attends to what the target's features gave up to position i (step 0 of rows 0 … i), and to its
own steps 1 … m: keys of all steps side by side under a mask that is a triangle, then diagonals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.engine.attention import Heads
from quire.engine.draft.eagle import EagleHead

_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Those that take any mask, with gradients."""


class Unrolled(NamedTuple):
    number: int
    normed: torch.Tensor
    """[sequence, token, hidden]: for the head's logits."""


class Unroll:
    """One batch of sequences; `features` [sequence, token, 3 × hidden], `tokens` [sequence, token]
    are the target's."""

    def __init__(self, head: EagleHead, features: torch.Tensor, tokens: torch.Tensor) -> None:
        self._head = head
        self._tokens = tokens
        self._shape = tokens.shape
        self._hidden = head.fused(features.flatten(0, 1))
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def steps(self, num_steps: int) -> Iterator[Unrolled]:
        """Next tokens are the sequences' own."""
        for number in range(num_steps):
            yield Unrolled(number, self.step(number, shifted(self._tokens, number + 1)))

    def step(self, number: int, next_tokens: torch.Tensor) -> torch.Tensor:
        """[sequence, token, hidden]; steps come one after another, from 0."""
        assert number == len(self._keys)
        num_sequences, length = self._shape
        positions = torch.arange(length, device=next_tokens.device) + number
        hidden, normed = self._head.step(
            self._hidden,
            next_tokens.flatten(),
            positions.repeat(num_sequences),
            self._attend,
        )
        self._hidden = hidden
        return normed.view(num_sequences, length, -1)

    def _attend(self, heads: Heads) -> torch.Tensor:
        num_sequences, length = self._shape
        query, key, value = (
            part.reshape(len(part), num_sequences, length, -1).transpose(0, 1) for part in heads
        )
        group = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(group, 1))
        self._values.append(value.repeat_interleave(group, 1))
        with sdpa_kernel(_KERNELS):
            found = functional.scaled_dot_product_attention(
                query,
                torch.cat(self._keys, 2),
                torch.cat(self._values, 2),
                attn_mask=_mask(length, len(self._keys), query.device),
                scale=self._head.spec.decoder.scaling,
            )  # [sequence, head, token, dim]
        return found.transpose(1, 2).flatten(2).flatten(0, 1)


def shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """[sequence, token] → what stands `by` places later; zeros where there is nothing."""
    return functional.pad(values[:, by:], (0, min(by, values.shape[1])))


def _mask(length: int, num_steps: int, device: torch.device) -> torch.Tensor:
    seen = torch.ones((length, length), dtype=torch.bool, device=device).tril()
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([seen] + [own] * (num_steps - 1), 1)
