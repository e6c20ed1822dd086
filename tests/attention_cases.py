"""Random sequences in scattered pages, their attention, and what its definition says."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from quire.engine.attention import Heads, pack
from quire.engine.attention.torch import TorchAttention
from quire.engine.batch import Batch, Segment
from quire.memory.device import DevicePool
from quire.memory.page_layout import PageLayout
from quire.types import RequestId, page_ids

PAGE, HEADS, KV, DIM = 4, 6, 2, 8
LAYOUT = PageLayout("full", 1, KV, DIM, "float32", PAGE)
NUM_PAGES = 256
SCALING = 0.3

sequences = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6
)  # (tokens before, tokens computed now)


def segment(number: int, start: int, count: int, pages: list[int]) -> Segment:
    tokens = np.zeros(count, dtype="<i4").tobytes()
    return Segment(RequestId(f"r{number}"), tokens, start, page_ids(pages), [], None)


def window_segment(number: int, start: int, count: int, pages: list[int], window: int) -> Segment:
    """One that has no more pages than its queries see."""
    first = max(0, start - window + 1) // PAGE
    seen = segment(number, start, count, [])
    return msgspec.structs.replace(seen, window=page_ids(pages[first:]), window_first=first)


def _firsts(parts: list[tuple[int, int, int]]) -> list[int]:
    """Where each begins in their row."""
    return [sum(n for _, _, n in parts[:i]) for i in range(len(parts))]


class Sequences:
    """Random keys, values and queries, their pages scattered over a pool full of NaN."""

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        seed: int,
        window: int = 0,
        sinks: bool = False,
        *,
        backend: Callable[[DevicePool, int], Any] = TorchAttention,
        device: str = "cpu",
        dtype: str = "float32",
        there: frozenset[int] = frozenset(),
    ) -> None:
        """`there`: sequences whose last token is in their pages already."""
        self.there = there
        torch.manual_seed(seed)
        self.window = window
        self.backend = backend
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.sinks = torch.randn(HEADS).to(device) * 2 if sinks else None
        layout = dataclasses.replace(LAYOUT, dtype=dtype)
        self.pool = DevicePool.allocate(layout, NUM_PAGES, device)
        for plane in self.pool.planes(0):
            plane.fill_(float("nan"))
        free = iter(np.random.default_rng(seed).permutation(NUM_PAGES).tolist())
        self.shapes = shapes
        self.tables = [
            [next(free) for _ in range(-(-(start + count) // PAGE))] for start, count in shapes
        ]
        self.keys = [self._randn(KV, start + count, DIM) for start, count in shapes]
        self.values = [self._randn(KV, start + count, DIM) for start, count in shapes]
        self.queries = [self._randn(HEADS, count, DIM) for _, count in shapes]

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)

    def attend(self) -> list[torch.Tensor]:
        """First what came before, in one go, then the batch under test."""
        backend = self.backend(self.pool, self.window)
        for i, (start, _) in enumerate(self.shapes):
            if start + (i in self.there):
                self._run(backend, [(i, 0, start + (i in self.there))])
        return self._run(backend, [(i, *shape) for i, shape in enumerate(self.shapes)])

    def _run(self, backend, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        batch = Batch(1, [self._segment(*part) for part in parts])
        plan = backend.plan(pack(batch, PAGE, self.window))
        query = torch.cat(
            [
                self.queries[i] if (start, n) == self.shapes[i] else self._randn(HEADS, n, DIM)
                for i, start, n in parts
            ],
            1,
        )
        key = torch.cat([self.keys[i][:, start : start + n] for i, start, n in parts], 1)
        value = torch.cat([self.values[i][:, start : start + n] for i, start, n in parts], 1)
        for row, part in zip(_firsts(parts), batch.segments, strict=True):
            if part.is_there:  # it must not come through
                key[:, row], value[:, row] = float("nan"), float("nan")
        output = backend.attend(
            plan, 0, Heads(query, key, value), scaling=SCALING, sinks=self.sinks
        )
        return list(output.split([n for _, _, n in parts]))

    def _segment(self, i: int, start: int, count: int) -> Segment:
        if self.window:
            return window_segment(i, start, count, self.tables[i], self.window)
        is_there = i in self.there and start == self.shapes[i][0]
        made = segment(i, start, count, self.tables[i])
        return msgspec.structs.replace(made, is_there=is_there)

    def expected(self, i: int) -> torch.Tensor:
        """The definition, in float64."""
        start, count = self.shapes[i]
        keys = self.keys[i].double().repeat_interleave(HEADS // KV, 0)
        values = self.values[i].double().repeat_interleave(HEADS // KV, 0)
        scores = self.queries[i].double() @ keys.transpose(1, 2) * SCALING
        keys_at, queries_at = (
            torch.arange(start + count, device=self.device),
            torch.arange(start, start + count, device=self.device)[:, None],
        )
        hidden = keys_at > queries_at
        if self.window:
            hidden |= keys_at <= queries_at - self.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, count, 1)
            shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        return (shares @ values).transpose(0, 1)

    def check(self, limit: float = 1e-5) -> None:
        for i, output in enumerate(self.attend()):
            torch.testing.assert_close(output.double(), self.expected(i), rtol=limit, atol=limit)
