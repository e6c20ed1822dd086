"""TorchAttention: torch's scaled_dot_product_attention over gathered pages, on CPU and CUDA.

Prompt segments are computed one by one: their pages are gathered into one contiguous run. Single
tokens (decoding) of similar length are computed together, padded to the longest of their group.
Query heads that share a key head are folded into the query length, so nothing is repeated.

With a window, only the pages that hold some of it are gathered, and a long prompt goes in blocks:

    key        0 ········ a ···· b ············ c
    block               queries [ ··············)       sees only what lies in [a, c),
                          ╰──── window ╯                a = b - window + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from quire.engine.attention.base import BatchPacking, Heads, RowSpan, Target
from quire.engine.attention.staging import Array, Staging
from quire.engine.branches import ancestors
from quire.memory.device import DevicePool

_MAX_GROUP_PADDING = 2
"""A group's longest sequence has at most so many times the pages of its shortest."""
_MIN_BLOCK = 512
"""Queries of one block of a prompt; the window's length, if that is more."""
_SINK_DIMS = 8
"""By so much queries and keys grow for a sink: kernels like sizes that divide by it."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Several tokens of one sequence."""

    rows: slice
    pages: torch.Tensor
    length: int
    mask: torch.Tensor | None
    """[num_tokens, length], True where a query may look; None: plainly causal."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """One token each of several sequences."""

    rows: torch.Tensor
    pages: torch.Tensor
    """[sequences, longest], padded with the sequence's own first page; the mask hides that."""
    mask: torch.Tensor | None
    """[sequences, 1, 1, longest × page_size]; None: there is only one, and it fills its pages."""


@dataclass(frozen=True, slots=True)
class _Plan:
    slots: torch.Tensor
    """Of those rows whose keys and values go into pages,"""
    written: torch.Tensor | None
    """which are these; None: all."""
    fresh: torch.Tensor | None
    prompts: list[PromptRows]
    decodes: list[_Decodes]


class TorchAttention:
    def __init__(self, pool: DevicePool, window: int = 0) -> None:
        """`window`: tokens a query sees, its own included; 0: all before it."""
        self._pool = pool
        self._window = window
        self._page_size = pool.layout.page_size
        self._staging = Staging(pool.device)

    def plan(self, packing: BatchPacking) -> _Plan:
        parts = self._blocks(packing.spans)
        singles = [span for span in parts if span.num_tokens == 1]
        written = packing.slots >= 0
        return _Plan(
            self._tensor(packing.slots[written]),
            None if written.all() else self._tensor(np.flatnonzero(written)),
            self._tensor(packing.fresh) if len(packing.fresh) else None,
            [self._prompt(span) for span in parts if span.num_tokens > 1],
            [self._decodes(group) for group in _groups(singles)],
        )

    def prompts(self, spans: Sequence[RowSpan]) -> list[PromptRows]:
        """A part of a plan, for `attend_prompts`."""
        return [self._prompt(span) for span in self._blocks(spans)]

    def target(self, plan: _Plan, layer: int) -> Target | None:
        return None

    def attend(
        self,
        plan: _Plan,
        layer: int,
        heads: Heads,
        *,
        scaling: float,
        sinks: torch.Tensor | None = None,
        is_appended: bool = False,
    ) -> torch.Tensor:
        assert not is_appended
        query, key, value = heads
        keys, values = self._pool.k(layer), self._pool.v(layer)  # [pages, page_size, kv, dim]
        if plan.fresh is not None:
            keys.index_fill_(0, plan.fresh, 0)
            values.index_fill_(0, plan.fresh, 0)
        for pages, rows in ((keys, key), (values, value)):
            new = rows.transpose(0, 1)
            if plan.written is not None:
                new = new.index_select(0, plan.written)
            pages.flatten(0, 1).index_copy_(0, plan.slots, new)
        num_heads, row, dim = query.shape
        output = query.new_empty((row, num_heads, dim))
        self.attend_prompts(plan.prompts, layer, query, output, scaling=scaling, sinks=sinks)
        for group in plan.decodes:
            count, kv = len(group.rows), keys.shape[2]
            k, v = _gather_many(keys, group.pages), _gather_many(values, group.pages)
            folded = query[:, group.rows].transpose(0, 1).reshape(count, kv, num_heads // kv, dim)
            attended = _attend(
                folded,
                k,
                v,
                group.mask,
                scaling=scaling,
                sinks=None if sinks is None else sinks.view(kv, num_heads // kv, 1),
            )  # [sequences, kv, heads per kv, dim]
            output[group.rows] = attended.reshape(count, num_heads, dim)
        return output

    def attend_prompts(
        self,
        prompts: Sequence[PromptRows],
        layer: int,
        query: torch.Tensor,
        output: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Into their rows of `output`. Nothing past a prompt's last token is read."""
        keys, values = self._pool.k(layer), self._pool.v(layer)
        for prompt in prompts:
            k, v = gather(keys, prompt.pages), gather(values, prompt.pages)
            attended = _attend(
                query[None, :, prompt.rows],
                k[None, :, : prompt.length],
                v[None, :, : prompt.length],
                prompt.mask,
                is_causal=prompt.mask is None,
                scaling=scaling,
                sinks=None if sinks is None else sinks[:, None, None],
            )  # [1, heads, tokens, dim]
            output[prompt.rows] = attended[0].transpose(0, 1)

    def _blocks(self, spans: Sequence[RowSpan]) -> list[RowSpan]:
        """With a window: spans cut up, each part with only the pages that its queries see."""
        if not self._window:
            return list(spans)
        return [block for span in spans for block in self._cut(span)]

    def _cut(self, span: RowSpan) -> list[RowSpan]:
        size, page_size = max(self._window, _MIN_BLOCK), self._page_size
        blocks = []
        for done in range(0, span.num_tokens, size):
            start, count = span.start + done, min(size, span.num_tokens - done)
            first = max(0, start - self._window + 1) // page_size
            last = -(-(start + count) // page_size)
            pages = span.pages[first:last]
            blocks.append(RowSpan(span.first + done, count, start - first * page_size, pages))
        return blocks

    def _prompt(self, span: RowSpan) -> PromptRows:
        mask = None
        slides = 0 < self._window < span.length
        if span.start or slides:
            mask = _all(span.num_tokens, span.length, self._pool.device).tril(span.start)
        if mask is not None and slides:
            mask = mask.triu(span.start - self._window + 1)
        if span.drafts:
            mask = _among_branches(span, self._pool.device)
        rows = slice(span.first, span.first + span.num_tokens)
        return PromptRows(rows, self._tensor(span.pages), span.length, mask)

    def _decodes(self, group: list[RowSpan]) -> _Decodes:
        longest = max(len(span.pages) for span in group)
        table = np.stack([_padded(span.pages, longest) for span in group])
        rows = np.array([span.first for span in group])
        lengths = np.array([[span.length] for span in group])
        places = np.arange(longest * self._page_size)
        seen = places < lengths
        if self._window:
            seen &= places >= lengths - self._window
        there = self._staging.send([rows, table, seen[:, None, None]])
        return _Decodes(there[0], there[1], None if seen.all() else there[2])

    def _tensor(self, array: Array) -> torch.Tensor:
        return self._staging.send([array])[0]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool = False,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """scaled_dot_product_attention; `sinks` [heads, 1 or queries, 1].

    A sink is one more key, with no value, whose score is the same for all queries of a head: in
    one more dimension that key is 1, all others are 0, and queries hold what makes the score.
    """
    if sinks is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    dim = query.shape[-1]
    if is_causal:
        mask = _all(query.shape[-2], key.shape[-2], query.device).tril()
    query = pad(query, (0, _SINK_DIMS))
    query[..., dim : dim + 1] = sinks / scaling
    key, value = (pad(tensor, (0, _SINK_DIMS, 0, 1)) for tensor in (key, value))
    key[..., -1, dim] = 1
    attended = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else pad(mask, (0, 1), value=True),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[..., :dim]


def _all(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    return torch.ones((queries, keys), dtype=torch.bool, device=device)


def _among_branches(span: RowSpan, device: torch.device) -> torch.Tensor:
    """[num_tokens, length]: in a tree of proposals each looks at those that it comes after."""
    first = span.length - span.drafts
    mask = _all(span.num_tokens, span.length, torch.device("cpu")).tril(span.start)
    rows = mask[span.num_tokens - span.drafts :]
    rows[:, first:] = False
    for number, above in enumerate(ancestors(span.drafts, span.branches)):
        rows[number, [first + place for place in (*above, number)]] = True
    return mask.to(device)


def _groups(spans: list[RowSpan]) -> list[list[RowSpan]]:
    """Sequences of similar length together, so that little is padded."""
    groups: list[list[RowSpan]] = []
    for span in sorted(spans, key=lambda span: len(span.pages)):
        if groups and len(span.pages) <= _MAX_GROUP_PADDING * len(groups[-1][0].pages):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _padded(pages: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    return np.pad(pages, (0, count - len(pages)), constant_values=pages[0])


def gather(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Pages of one sequence as [kv heads, tokens, dim]."""
    return plane.index_select(0, pages).flatten(0, 1).transpose(0, 1)


def _gather_many(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Pages of several sequences as [sequences, kv heads, tokens, dim]."""
    count, longest = pages.shape
    chosen = plane.index_select(0, pages.flatten())  # [count × longest, page_size, kv, dim]
    return chosen.view(count, longest * plane.shape[1], *plane.shape[2:]).transpose(1, 2)
