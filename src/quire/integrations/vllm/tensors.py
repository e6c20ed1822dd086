"""From vLLM's KV tensors to pages: which bytes of which layer are block i. Knows torch, no vLLM.

vLLM gives one tensor per layer, and its shape depends on the attention backend:

    CPU             [blocks, heads, tokens, 2 × dim]     K and V of a token beside each other
    FlashAttention  [2, blocks, tokens, heads, dim]      K of all blocks, then V
    FlashInfer      [blocks, 2, tokens, heads, dim]      K and V of a block
    latent (MLA)    [blocks, tokens, dim]                one vector for both

and its strides on the layout: with HND the heads of a block lie before its tokens, whatever the
shape says. With several groups of layers all tensors lie in one memory, and which layer's state a
block holds is known by its number alone: only the layers of its group are read or written.

A page is what a block's number selects, or several, one of each group; where that is not
contiguous, it is cut into *planes* that are. Order inside a plane is part of the layout's name, so
that pages which mean something else are never taken for these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quire.errors import ConfigError
from quire.memory.page_layout import InnerLayout, PageLayout


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What vLLM says of a layer's blocks."""

    num_blocks: int
    tokens: int
    heads: int
    dim: int
    """Of K, and of V."""


@dataclass(frozen=True, slots=True)
class KvTensors:
    kind: str
    """How K and V lie to each other, and layers, which the layout's numbers alone do not say."""
    layout: PageLayout
    planes: list[list[torch.Tensor]]
    """By layer, for DevicePool."""
    parts: list[range]
    """Layers of each of vLLM's groups, whose blocks have numbers of their own."""


def fingerprint(weights: str, kinds: Sequence[KvTensors]) -> str:
    """Of the weights, as these pages hold what is computed with them."""
    return " ".join([weights, *(tensors.kind for tensors in kinds)])


def describe(
    groups: Sequence[Mapping[str, torch.Tensor]], shape: BlockShape, component: str = "full"
) -> KvTensors:
    """Of a rank's layers of one kind of attention: those of each of vLLM's groups, in the model's
    order. Raises ConfigError for what is not known."""
    layers = [_planes(name, tensor, shape) for group in groups for name, tensor in group.items()]
    kinds = {(one.kind, one.layout) for one in layers}
    if len(kinds) != 1:
        raise ConfigError(
            f"the layers' KV caches differ ({len(kinds)} kinds): Quire takes models whose "
            f"layers of kind {component} are alike"
        )
    kind, one = kinds.pop()
    layout = replace(one, num_layers=len(layers), component=component)
    parts: list[range] = []
    first = 0
    for group in groups:
        parts.append(range(first, first + len(group)))
        first += len(group)
    if len(groups) > 1:  # a page's layers lie in this order
        names = "\0".join(name for group in groups for name in group)
        kind = f"{kind} {hashlib.sha256(names.encode()).hexdigest()}"
    planes = [planes for layer in layers for planes in layer.planes]
    return KvTensors(kind, layout, planes, parts)


def _planes(name: str, tensor: torch.Tensor, shape: BlockShape) -> KvTensors:
    """Of one layer."""
    blocks, tokens, heads, dim = shape.num_blocks, shape.tokens, shape.heads, shape.dim
    sizes = tuple(tensor.shape)
    if sizes == (2, blocks, tokens, heads, dim):
        return _of("apart", name, list(tensor.unbind(0)), shape, dim)
    if sizes == (blocks, 2, tokens, heads, dim):
        return _together(name, tensor, shape)
    if sizes in ((blocks, heads, tokens, 2 * dim), (blocks, tokens, heads, 2 * dim)):
        heads_first = sizes[1] == heads and sizes[2] == tokens
        plane = tensor.transpose(1, 2) if heads_first else tensor
        return _of("packed", name, [plane], shape, 2 * dim)
    if sizes == (blocks, tokens, dim) and heads == 1:
        return _of("latent", name, [tensor.unsqueeze(2)], shape, dim)
    raise ConfigError(
        f"the KV cache of {name} is {sizes}, which Quire does not know for {blocks} blocks of "
        f"{tokens} tokens, {heads} heads, {dim} wide"
    )


def _together(name: str, tensor: torch.Tensor, shape: BlockShape) -> KvTensors:
    """K and V of a block lie one after the other: one plane, which is faster to copy than two. In
    the words of a layout they are two wide heads, or V's heads come after K's."""
    heads, dim = shape.heads, shape.dim
    dtype = str(tensor.dtype).removeprefix("torch.")
    turned = tensor.transpose(2, 3)
    if _is_whole(tensor):
        sizes, plane = (2, heads * dim), tensor.flatten(3)
    elif _is_whole(turned):
        sizes, plane = (2 * heads, dim), turned.flatten(1, 2)
    else:
        raise _scattered(name, tensor)
    layout = PageLayout("full", 1, *sizes, dtype, shape.tokens, InnerLayout.HND, num_planes=1)
    return KvTensors("together", layout, [[plane]], [range(1)])


def _of(
    kind: str, name: str, planes: Sequence[torch.Tensor], shape: BlockShape, width: int
) -> KvTensors:
    """Planes come as [blocks, tokens, heads, width], in whatever order they lie in memory."""
    turned = [plane.transpose(1, 2) for plane in planes]
    if all(_is_whole(plane) for plane in planes):
        inner, views = InnerLayout.NHD, list(planes)
    elif all(_is_whole(plane) for plane in turned):
        inner, views = InnerLayout.HND, turned
    else:
        raise _scattered(name, planes[0])
    dtype = str(planes[0].dtype).removeprefix("torch.")
    layout = PageLayout(
        "full", 1, shape.heads, width, dtype, shape.tokens, inner, num_planes=len(planes)
    )
    return KvTensors(kind, layout, [views], [range(1)])


def _is_whole(plane: torch.Tensor) -> bool:
    return plane[0].is_contiguous()


def _scattered(name: str, tensor: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"the KV cache of {name} has strides {tensor.stride()}: a block's keys must lie together"
    )
