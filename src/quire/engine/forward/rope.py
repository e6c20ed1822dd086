"""Positions, worked into queries and keys: which frequencies a configuration means, and the turn.

A head's dimension i and dimension i + dim / 2 are one plane, turned by position × frequency[i].
Frequencies here never depend on how long a sequence is: a key once computed stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SCALED = ("linear", "llama3", "yarn")
"""Kinds whose frequencies transformers works out for us, beside the plain one."""
_PLAIN = "default"


@dataclass(frozen=True, slots=True)
class Rope:
    frequencies: tuple[float, ...]
    """dim / 2 of them."""
    factor: float
    """Of sines and cosines (yarn); else 1."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a row of positions does to queries and keys; each [row, dim / 2], float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def widened(self, dtype: torch.dtype) -> Rotation:
        """For `turned`: each [row, 1, dim], with the first half of the sines negated."""
        cos, sin = self.cos.to(dtype)[:, None], self.sin.to(dtype)[:, None]
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def refusal(text: Any, kind: str | None = None) -> str | None:
    """Why we cannot compute the positions of layers of this kind (None: of all); None: we can."""
    parameters = _parameters(text, kind)
    if parameters.get("rope_type") not in (_PLAIN, *_SCALED):
        return f"its position embedding is of type {parameters.get('rope_type')!r}"
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return "it works positions into a part of each head only (partial_rotary_factor)"
    return None


def rope_of(text: Any, head_dim: int, kind: str | None = None) -> Rope:
    """Of a configuration that `refusal` has nothing against."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = _parameters(text, kind)
    if parameters["rope_type"] == _PLAIN:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    compute: Any = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, factor = compute(text, torch.device("cpu"), layer_type=kind)
    return Rope(tuple(frequencies.tolist()), float(factor))


class Turner:
    """From positions to turns, for all layers of a model."""

    def __init__(self, ropes: Sequence[Rope], device: torch.device) -> None:
        """`ropes`: of each layer; layers with the same one share their turn."""
        self._kinds = list(dict.fromkeys(ropes))
        self.kind_of = [self._kinds.index(rope) for rope in ropes]
        """Which of the turns is a layer's."""
        self._frequencies = [
            torch.tensor(rope.frequencies, dtype=torch.float32, device=device)
            for rope in self._kinds
        ]

    def turns(self, positions: torch.Tensor) -> list[Rotation]:
        """`positions` [row], on the device → by kind."""
        wide = positions.to(torch.float32)[:, None]
        made = []
        for rope, frequencies in zip(self._kinds, self._frequencies, strict=True):
            angles = wide * frequencies
            cos, sin = angles.cos(), angles.sin()
            if rope.factor != 1:
                cos, sin = cos.mul_(rope.factor), sin.mul_(rope.factor)
            made.append(Rotation(cos, sin))
        return made


def turned(heads: torch.Tensor, by: Rotation) -> torch.Tensor:
    """`heads` [row, any number, dim] → the same, with their positions worked in; `by` widened."""
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), -1)
    return (heads * by.cos).addcmul_(swapped, by.sin)


def _parameters(text: Any, kind: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    return parameters if kind is None else parameters.get(kind) or {}
