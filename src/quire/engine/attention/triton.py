"""TritonAttention: kernels of our own for few queries, torch's for many. For CUDA.

Single tokens (decoding) are computed in one go, over their page tables; so are short chunks, such
as what is left of a prompt after a hit. A long chunk on a prefix is computed in parts, whose
results are merged:

    key        0 ·············· start ······ start + n
    queries                      [ ··········)
    sees       [ from the pages )                        everything: no mask
                                 [ ··········)           causal

With a window, long chunks go the way of TorchAttention. Nothing beyond a sequence's length is read,
so what an earlier owner left in a page does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.attention.base import BatchPacking, Heads, RowSpan, Target
from quire.engine.attention.installed import installed_ways, seconds
from quire.engine.attention.prefixed import AttendedPart, AttentionWay, AttentionWays
from quire.engine.attention.staging import Array, Staging
from quire.engine.attention.torch import PromptRows, TorchAttention, gather
from quire.engine.kernels.append import append
from quire.engine.kernels.decode import Tables, decode, fills, num_splits, split_tokens
from quire.engine.kernels.merge import merge
from quire.memory.device import DevicePool, torch_dtype

_SHORT = 128
"""Tokens of a chunk that goes through our own kernel: its pages are not gathered then, but are read
once for every few queries."""
PIECE = 32
"""About so many."""
_LONG = 8192
"""Tokens before a chunk, when ways to attend to them are compared."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Many tokens of one sequence, of which a layer sees everything before."""

    rows: slice
    start: int
    before: torch.Tensor
    """Pages of what comes before."""


@dataclass(frozen=True, slots=True)
class _Plan:
    slots: torch.Tensor
    tables: Sequence[Tables]
    """Of single tokens, and of short chunks."""
    chunks: Sequence[_Chunk] = ()
    masked: Sequence[PromptRows] = ()
    """Long ones with windows, and trees."""


class TritonAttention:
    def __init__(self, pool: DevicePool, window: int = 0) -> None:
        """`window`: tokens a query sees, its own included; 0: all before it."""
        assert all(plane.is_contiguous() for plane in pool.planes(0))
        self._pool = pool
        self._window = window
        self._parts = AttentionWays(pool.device, torch_dtype(pool.layout))
        self._torch = TorchAttention(pool, window)
        self._staging = Staging(pool.device)

    def plan(self, packing: BatchPacking) -> _Plan:
        singles = [span for span in packing.spans if span.num_tokens == 1]
        trees = [span for span in packing.spans if span.drafts]
        several = [span for span in packing.spans if span.num_tokens > 1 and not span.drafts]
        short = [span for span in several if span.num_tokens <= _SHORT]
        long = [span for span in several if span.num_tokens > _SHORT]
        chunks = [] if self._window else long
        few = [spans for spans in (singles, short) if spans]
        page_size = self._pool.layout.page_size
        slots, *rest = self._staging.send(
            [
                packing.slots.astype(np.int32),
                *(column for spans in few for column in self._tables(spans)),
                *(span.pages[: -(-span.start // page_size)] for span in chunks),
            ]
        )
        return _Plan(
            slots,
            [self._sent(rest[6 * i : 6 * i + 6], spans) for i, spans in enumerate(few)],
            [
                _Chunk(slice(span.first, span.first + span.num_tokens), span.start, before)
                for span, before in zip(chunks, rest[6 * len(few) :], strict=True)
            ],
            self._torch.prompts([*(long if self._window else ()), *trees]),
        )

    def planned(self, slots: torch.Tensor, tables: Sequence[Tables]) -> _Plan:
        """From what is on the device already."""
        return _Plan(slots, tables)

    @property
    def token_bytes(self) -> int:
        """Of one token in the pages."""
        return self._pool.layout.page_bytes // self._pool.layout.page_size

    def fills(self, num_sequences: int) -> bool:
        """Whether decoding so many of the same length needs no splits."""
        return fills(num_sequences, self._pool.layout.num_kv_heads)

    def max_splits(self, num_pieces: int) -> int:
        """For `planned`, as Tables has it, unless it is 1."""
        return num_splits(num_pieces, self._pool.layout.num_kv_heads)

    def split(self, lengths: npt.NDArray[np.int32], max_splits: int) -> int:
        """For `planned`, as Tables has it."""
        kv_heads = self._pool.layout.num_kv_heads
        return split_tokens(lengths, self._window, max_splits=max_splits, num_kv_heads=kv_heads)

    @torch.inference_mode()
    def prepare(self, num_q_heads: int, scaling: float, *, max_queries: int, max_keys: int) -> None:
        """Have torch's attention plan what it plans once: for chunks of up to so many tokens, as
        rows of queries, keys and values, on so many before them."""
        layout = self._pool.layout
        kv, dim = layout.num_kv_heads, layout.head_dim
        queries = [] if self._window else self._parts.fast_lengths(max_queries)
        for count in queries:
            row = self._pool.k(0).new_zeros((count, num_q_heads + 2 * kv, dim)).transpose(0, 1)
            own = Heads(row[: -2 * kv], row[-2 * kv : -kv], row[-kv:])
            self._parts(own, True, scaling)
            for length in self._parts.fast_lengths(max_keys):
                before = self._pool.k(0).new_zeros((length, kv, dim)).transpose(0, 1)
                self._parts(Heads(own.query, before, before), False, scaling)
        if queries:
            self._consider_installed(num_q_heads, scaling)

    def _consider_installed(self, num_q_heads: int, scaling: float) -> None:
        layout, like = self._pool.layout, self._pool.k(0)
        before = like.new_zeros((_LONG, layout.num_kv_heads, layout.head_dim)).transpose(0, 1)
        rows = like.new_zeros((_LONG, num_q_heads, layout.head_dim)).transpose(0, 1)

        def timed(way: AttentionWay, num_queries: int) -> float:
            return seconds(way, Heads(rows[:, :num_queries], before, before), scaling)

        for way in installed_ways(self._pool.device, torch_dtype(layout), layout.head_dim):
            self._parts.consider(way, timed)

    def target(self, plan: _Plan, layer: int) -> Target | None:
        return Target(self._pool.k(layer), self._pool.v(layer), plan.slots)

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
        query, key, value = heads
        keys, values = self._pool.k(layer), self._pool.v(layer)  # [pages, page_size, kv, dim]
        if not is_appended:
            append(key, value, plan.slots, keys, values)
        num_heads, row, dim = query.shape
        if query.stride(2) != 1:
            query = query.contiguous()
        output = query.new_empty((row, num_heads, dim))
        for tables in plan.tables:
            decode(
                query,
                keys,
                values,
                tables,
                output,
                scaling=scaling,
                window=self._window,
                sinks=sinks,
            )
        for chunk in plan.chunks:
            own = Heads(*(x[:, chunk.rows] for x in (query, key, value)))
            before = [gather(plane, chunk.before)[:, : chunk.start] for plane in (keys, values)]
            parts = self._attended(own, before, scaling)
            first = chunk.rows.start
            for part in parts:
                attended = part.out.transpose(0, 1)
                if sinks is not None:
                    attended = attended * torch.sigmoid(part.lse.t() - sinks)[..., None]
                if len(attended) == row:
                    return attended.to(query.dtype)
                output[first : first + len(attended)] = attended
                first += len(attended)
        if plan.masked:
            self._torch.attend_prompts(
                plan.masked, layer, query, output, scaling=scaling, sinks=sinks
            )
        return output

    def _tables(self, spans: Sequence[RowSpan]) -> tuple[Array, ...]:
        """As Tables has them."""
        num_pages = np.array([len(span.pages) for span in spans], dtype=np.int32)
        return (
            np.array([span.first for span in spans], dtype=np.int32),
            np.array([span.num_tokens for span in spans], dtype=np.int32),
            np.array([span.length for span in spans], dtype=np.int32),
            np.cumsum(num_pages, dtype=np.int32) - num_pages,
            np.concatenate([span.pages for span in spans]),
            np.array([self._splits(spans)[0]], dtype=np.int32),
        )

    def _sent(self, columns: Sequence[torch.Tensor], spans: Sequence[RowSpan]) -> Tables:
        """`columns`: as of `_tables`, on the device."""
        rows, counts, lengths, firsts, pages, split = columns
        longest = max(span.num_tokens for span in spans)
        most = self._splits(spans)[1]
        return Tables(rows, counts, lengths, firsts, pages, split, most, longest)

    def _splits(self, spans: Sequence[RowSpan]) -> tuple[int, int]:
        """`split` and `max_splits` of a table."""
        pieces = [-(-span.num_tokens // PIECE) for span in spans]
        lengths = np.repeat(np.array([span.length for span in spans], dtype=np.int32), pieces)
        most = self.max_splits(len(lengths))
        split = self.split(lengths, most)
        return split, 1 if split >= lengths.max() else most

    def _attended(
        self, own: Heads, before: Sequence[torch.Tensor], scaling: float
    ) -> Iterator[AttendedPart]:
        """Of a chunk, cut up, one after the other; `before`: keys and values."""
        done = 0
        for size in self._parts.cut(own.query.shape[1]):
            some = Heads(*(x[:, done : done + size] for x in own))
            part = self._parts(some, True, scaling)
            for keys, values in (before, (own.key[:, :done], own.value[:, :done])):
                for seen in self._cut(size, keys.shape[1]):
                    other = Heads(some.query, keys[:, seen], values[:, seen])
                    merge(*part, *self._parts(other, False, scaling))
            yield part
            done += size

    def _cut(self, num_queries: int, num_keys: int) -> Iterator[slice]:
        if not num_keys:
            return
        if not self._parts.is_fast(num_queries):
            yield slice(0, num_keys)
            return
        first = 0
        for size in self._parts.cut(num_keys):
            yield slice(first, first + size)
            first += size
