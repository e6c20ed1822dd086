"""Tensor parallelism: cut a transformers model down to one rank's share, in place.

Follows the plan that each model in transformers carries (`_tp_plan`): which linear layers are cut
by output ("colwise") and which by input ("rowwise", summed over ranks afterwards). Attention is
cut at whole key-value heads, which need not divide evenly: with 3 heads on 2 ranks one has 2.
Embeddings and the output head are kept whole everywhere: every rank can compute the logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from quire.errors import ConfigError, ModelError
from quire.models import ModelShape

Range = tuple[int, int]
AllReduce = Callable[[torch.Tensor], None]

_QUERY_SIDE = ("q_proj", "o_proj")
_KEY_VALUE_SIDE = ("k_proj", "v_proj")
_WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_rowwise",
    "replicated",
    "replicated_with_grad_allreduce",
)


def share(total: int, rank: int, num_ranks: int) -> Range:
    """The part of [0, total) that is this rank's: contiguous, sizes differ by at most one."""
    return rank * total // num_ranks, (rank + 1) * total // num_ranks


def head_share(shape: ModelShape, rank: int, num_ranks: int) -> Range:
    """This rank's key-value heads. Raises ConfigError if the model cannot be split so."""
    if shape.recurrent_layers and num_ranks > 1:
        raise ConfigError(
            f"tp is {num_ranks}, but the recurrent layers of {shape.architecture} cannot be split: "
            "run it with --tp 1"
        )
    if num_ranks > shape.num_kv_heads:
        raise ConfigError(
            f"tp is {num_ranks}, but the model has only {shape.num_kv_heads} key-value heads: "
            f"use --tp {shape.num_kv_heads} or less"
        )
    return share(shape.num_kv_heads, rank, num_ranks)


def shard(
    model: nn.Module, shape: ModelShape, rank: int, num_ranks: int, all_reduce: AllReduce
) -> None:
    """Keep only this rank's part of the weights. Raises ModelError for plans we cannot follow."""
    plan = _plan(model)
    heads = head_share(shape, rank, num_ranks)
    group = shape.num_q_heads // shape.num_kv_heads
    cut = 0
    for name, module in model.named_modules():
        style = plan(name)
        if style is None or style in _WHOLE:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(module, nn.Linear):
            raise ModelError(f"{name} is to be split as {style!r}: run this model with --tp 1")
        leaf = name.rpartition(".")[2]
        dim = 0 if style == "colwise" else 1
        if leaf in _QUERY_SIDE:
            keep = _scaled(heads, group * shape.head_dim)
        elif leaf in _KEY_VALUE_SIDE:
            keep = _scaled(heads, shape.head_dim)
        else:
            keep = share(module.weight.shape[dim], rank, num_ranks)
        _cut(module, dim, keep)
        if style == "rowwise":
            _sum_over_ranks(module, rank, all_reduce)
        cut += 1
    if not cut:
        raise ModelError("the model says nothing about how to split it: run it with --tp 1")


def _plan(model: nn.Module) -> Callable[[str], str | None]:
    styles: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in styles.items()
    ]

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in patterns if pattern.fullmatch(name)), None)

    return style_of


def _scaled(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor


def _cut(module: nn.Linear, dim: int, keep: Range) -> None:
    first, last = keep
    weight = module.weight.detach().narrow(dim, first, last - first).clone()
    module.weight = nn.Parameter(weight, requires_grad=False)
    if dim == 0:
        module.out_features = last - first
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias.detach()[first:last].clone(), False)
    else:
        module.in_features = last - first


def _sum_over_ranks(module: nn.Linear, rank: int, all_reduce: AllReduce) -> None:
    if module.bias is not None and rank != 0:
        module.register_parameter("bias", None)  # added once, by rank 0

    def add_up(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        all_reduce(output)
        return output

    module.register_forward_hook(add_up)
