"""DenseWeights: a dense decoder's weights, read from safetensors straight to where they are used.

Matrices that are multiplied with the same input lie in one: queries, keys and values; gate and up.
Each is allocated once, on its device, in its dtype and in this rank's size, and filled in place
from slices of the files, of which nothing else is read:

    qkv       [ q heads of this rank | k heads | v heads ) × hidden
    gate_up   [ gate, this rank's part | up ) × hidden
    o, down   hidden × this rank's part: what they give is to be summed over ranks

Embedding, output head and norms are whole on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quire.engine.forward.matrices import are_packed, packed
from quire.engine.forward.spec import DenseSpec
from quire.engine.parallel import Range, share
from quire.models.weights import StoredTensor

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_READABLE = {"F32", "BF16", "F16"}


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    """Packed: see matrices.py."""
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    """[heads of queries and of keys, head_dim]"""
    o: Linear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DenseWeights:
    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    """The embedding itself if they are tied."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has of every layer: whole key-value heads with their query heads, and a part
    of the MLP."""

    kv_heads: Range
    q_heads: Range
    mlp: Range
    adds_biases: bool = True
    """Biases of what is summed over ranks: one rank adds them."""

    @classmethod
    def of(cls, spec: DenseSpec, rank: int, num_ranks: int) -> RankPart:
        first, last = share(spec.num_kv_heads, rank, num_ranks)
        group = spec.num_q_heads // spec.num_kv_heads
        mlp = share(spec.mlp_size, rank, num_ranks)
        return cls((first, last), (first * group, last * group), mlp, adds_biases=rank == 0)


def weights_refusal(spec: DenseSpec, stored: dict[str, StoredTensor]) -> str | None:
    """Why the files do not hold such a decoder as we read it; None: they do."""
    for name, shape in expected(spec):
        if name not in stored:
            if name != HEAD or not spec.is_tied:
                return f"its weights have no {name}"
        elif stored[name].shape != shape:
            return f"{name} is {list(stored[name].shape)} and not {list(shape)}"
        elif stored[name].dtype not in _READABLE:
            return f"{name} is stored as {stored[name].dtype}"
    return None


def load_weights(
    spec: DenseSpec,
    stored: dict[str, StoredTensor],
    part: RankPart,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> DenseWeights:
    """Of files that `weights_refusal` has nothing against."""
    with contextlib.ExitStack() as files:
        reader = _Reader(files, stored, spec, part, dtype=dtype, device=device)
        embedding = reader.whole(EMBEDDING)
        head = embedding
        if HEAD in stored:
            head = reader.whole(HEAD)
            # As transformers does it: what the files say counts, whatever the configuration says.
            if spec.is_tied and torch.equal(head, embedding):
                head = embedding
        layers = tuple(reader.layer(number) for number in range(spec.num_layers))
        return DenseWeights(embedding, layers, reader.norm(LAST_NORM), head)


class _Reader:
    def __init__(
        self,
        files: contextlib.ExitStack,
        stored: dict[str, StoredTensor],
        spec: DenseSpec,
        part: RankPart,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._files = files
        self._stored = stored
        self._spec = spec
        self._part = part
        self._dtype = dtype
        self._device = device
        self._open: dict[Path, Any] = {}
        self._filled = self._empty(0)

    def layer(self, number: int) -> LayerWeights:
        spec, part, dim = self._spec, self._part, self._spec.head_dim
        attention, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
        q, kv = _scaled(part.q_heads, dim), _scaled(part.kv_heads, dim)
        norms = [self.norm(f"model.layers.{number}.{name}.weight") for name in _norms(spec)]
        qk_norm = None
        if spec.qk_norm:
            heads = [part.q_heads[1] - part.q_heads[0], part.kv_heads[1] - part.kv_heads[0]]
            each = [self.norm(f"{attention}{name}.weight") for name in ("q_norm", "k_norm")]
            qk_norm = torch.cat([w.expand(n, dim) for w, n in zip(each, heads, strict=True)])
        return LayerWeights(
            attention_norm=norms[0],
            qkv=self._rows(
                [(f"{attention}{name}_proj", r) for name, r in (("q", q), ("k", kv), ("v", kv))],
                spec.qkv_bias,
            ),
            qk_norm=qk_norm,
            o=self._columns(f"{attention}o_proj", q, spec.o_bias),
            attention_post_norm=norms[1] if spec.post_norms else None,
            mlp_norm=norms[2] if spec.post_norms else norms[1],
            gate_up=self._rows(
                [(f"{mlp}{name}_proj", part.mlp) for name in ("gate", "up")], spec.mlp_bias
            ),
            down=self._columns(f"{mlp}down_proj", part.mlp, spec.mlp_bias),
            mlp_post_norm=norms[3] if spec.post_norms else None,
        )

    def whole(self, name: str) -> torch.Tensor:
        stored: torch.Tensor = self._slice(name)[:]
        return stored.to(self._device, self._dtype, copy=True)

    def norm(self, name: str) -> torch.Tensor:
        """With its offset, if there is one: in float32 then, where it is applied."""
        if not self._spec.norm_offset:
            return self.whole(name)
        return self.whole(name).to(torch.float32) + self._spec.norm_offset

    def _rows(self, parts: Sequence[tuple[str, Range]], has_bias: bool) -> Linear:
        """These rows of several matrices, one below the other."""
        sizes = [last - first for _, (first, last) in parts]
        weight = self._matrix(sum(sizes), self._spec.hidden_size)
        bias = self._empty(sum(sizes)) if has_bias else None
        for place, (name, (first, last)) in zip(_places(sizes), parts, strict=True):
            weight[place].copy_(self._slice(f"{name}.weight")[first:last])
            if bias is not None:
                bias[place].copy_(self._slice(f"{name}.bias")[first:last])
        return Linear(packed(weight), bias)

    def _columns(self, name: str, columns: Range, has_bias: bool) -> Linear:
        first, last = columns
        weight = self._matrix(self._spec.hidden_size, last - first)
        weight.copy_(self._slice(f"{name}.weight")[:, first:last])
        adds = has_bias and self._part.adds_biases
        return Linear(packed(weight), self.whole(f"{name}.bias") if adds else None)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        """To fill. One that will be packed is filled where the one before it was: what is copied
        and given back piece by piece leaves holes in memory."""
        if not are_packed(self._device, self._dtype):
            return self._empty(rows, columns)
        if len(self._filled) < rows * columns:
            self._filled = self._empty(rows * columns)
        return self._filled[: rows * columns].view(rows, columns)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _slice(self, name: str) -> Any:
        """What is cut from it is a view of the file's pages, read when it is copied."""
        file = self._stored[name].file
        if file not in self._open:
            opened: Any = safe_open(str(file), framework="pt", device="cpu")
            self._open[file] = self._files.enter_context(opened)
        return self._open[file].get_slice(name)


def expected(spec: DenseSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all weights, the head's included."""
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_q_heads * dim, spec.num_kv_heads * dim
    yield EMBEDDING, (spec.vocab_size, hidden)
    yield HEAD, (spec.vocab_size, hidden)
    yield LAST_NORM, (hidden,)
    linears = (
        *((f"self_attn.{name}_proj", size, hidden, spec.qkv_bias) for name, size in
          (("q", q), ("k", kv), ("v", kv))),
        ("self_attn.o_proj", hidden, q, spec.o_bias),
        ("mlp.gate_proj", spec.mlp_size, hidden, spec.mlp_bias),
        ("mlp.up_proj", spec.mlp_size, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, spec.mlp_size, spec.mlp_bias),
    )  # fmt: skip
    for number in range(spec.num_layers):
        layer = f"model.layers.{number}."
        for name, rows, columns, has_bias in linears:
            yield f"{layer}{name}.weight", (rows, columns)
            if has_bias:
                yield f"{layer}{name}.bias", (rows,)
        for name in _norms(spec):
            yield f"{layer}{name}.weight", (hidden,)
        if spec.qk_norm:
            yield f"{layer}self_attn.q_norm.weight", (dim,)
            yield f"{layer}self_attn.k_norm.weight", (dim,)


def _norms(spec: DenseSpec) -> tuple[str, ...]:
    """In the order of their use in a layer."""
    two = ("input_layernorm", "post_attention_layernorm")
    return (*two, "pre_feedforward_layernorm", "post_feedforward_layernorm")[
        : 4 if spec.post_norms else 2
    ]


def _scaled(part: Range, factor: int) -> Range:
    return part[0] * factor, part[1] * factor


def _places(sizes: Sequence[int]) -> Iterator[slice]:
    """Where pieces of these sizes lie, one after another."""
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += size
