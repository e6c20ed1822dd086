"""Attention from a package that people install beside torch: flash-attn, in any of its versions.

Used where it is installed, right and faster: tried once at start against the definition, on a small
case, and timed beside what torch has. How it is found and called is known here and nowhere else.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from quire.engine.attention.base import Heads
from quire.engine.attention.prefixed import AttendedPart, AttentionWay, by_definition

_logger = logging.getLogger(__name__)

MODULES = ("flash_attn_interface", "flash_attn.cute", "flash_attn")
"""The third version, the fourth and the second; they have the function in common."""
_FUNCTION = "flash_attn_func"
_FLAGS = ("return_lse", "return_attn_probs")
"""By which it gives the log-sum-exp too, by version."""
_NUM_HEADS, _NUM_KV_HEADS, _NUM_QUERIES, _NUM_KEYS = 8, 2, 256, 512
_TOLERANCE = 0.03
"""Of outputs of about 1, and of their log-sum-exp, in half precision."""
_ROUNDS = 5


def installed_ways(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[AttentionWay]:
    """Those that give what the definition gives."""
    found: list[AttentionWay] = []
    for name in MODULES:
        try:
            way = _way_of(getattr(importlib.import_module(name), _FUNCTION))
        except Exception as error:  # whatever comes of importing what others wrote
            if not isinstance(error, ModuleNotFoundError):
                _logger.warning("attention: %s cannot be used: %s", name, error)
            continue
        if (refusal := _refusal(way, device, dtype, head_dim)) is not None:
            _logger.warning("attention: %s is not used: %s", name, refusal)
        else:
            found.append(way)
    return found


def seconds(way: AttentionWay, heads: Heads, scaling: float) -> float:
    """The fastest of a few rounds; what is planned or compiled first does not count."""

    def once() -> float:
        start = time.perf_counter()
        way(heads, False, scaling)
        if heads.query.is_cuda:
            torch.cuda.synchronize(heads.query.device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(_ROUNDS))


def _way_of(function: Callable[..., Any]) -> AttentionWay:
    known = inspect.signature(function).parameters
    flag = next(flag for flag in _FLAGS if flag in known)

    def way(heads: Heads, is_causal: bool, scaling: float) -> AttendedPart:
        rows = [x.transpose(0, 1)[None] for x in heads]
        try:
            out, lse, *_ = function(*rows, softmax_scale=scaling, causal=is_causal, **{flag: True})
        except (RuntimeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return AttendedPart(out[0].transpose(0, 1), lse[0])

    return way


def _refusal(
    way: AttentionWay, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Why it cannot be used; None: it gives what it should."""
    chance = torch.Generator().manual_seed(0)

    def rows(num_heads: int, count: int) -> torch.Tensor:
        made = torch.randn((count, num_heads, head_dim), generator=chance)
        return made.to(device, dtype).transpose(0, 1)

    for is_causal, num_keys in ((True, _NUM_QUERIES), (False, _NUM_KEYS)):
        keys = [rows(_NUM_KV_HEADS, num_keys) for _ in range(2)]
        heads = Heads(rows(_NUM_HEADS, _NUM_QUERIES), *keys)
        try:
            found = way(heads, is_causal, head_dim**-0.5)
        except RuntimeError as error:
            return str(error)
        for mine, true in zip(found, by_definition(heads, is_causal, head_dim**-0.5), strict=True):
            if mine.shape != true.shape:
                return f"it gives {list(mine.shape)} and not {list(true.shape)}"
            if not (off := float((mine.float() - true.float()).abs().max())) < _TOLERANCE:
                return f"it is off by {off:.2g}"
    return None
