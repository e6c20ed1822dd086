"""GraphForward: batches that only decode, replayed as CUDA graphs; all others as they come.

A graph is a fixed sequence of kernels on fixed memory. One is captured for each of a few batch
sizes; a batch takes the next larger one. What differs from step to step lies in one block on the
device, filled by one copy:

    tokens | drawn | sources | positions |   slots | lengths | firsts | split   | …   pages
    ╰─ one number per sequence ──────────╯ ╰─ of each component ──────────────╯     of all

Each column is as long as the largest batch; of `split` one number is used. Sequences that fill up a
batch have a length of 0 and the slot −1: they read nothing and write nowhere. `sources` says where
a sequence's token is found: among `tokens`, or among those `drawn` by the batch before, which come
from the device itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from quire.engine.attention.columns import Columns, columns
from quire.engine.attention.triton import TritonAttention
from quire.engine.batch import Batch, Segment
from quire.engine.bridge import AttentionBridge, Inputs
from quire.engine.forward.dense import DenseForward
from quire.engine.kernels.decode import Tables
from quire.types import OperationId

_logger = logging.getLogger(__name__)

_OWN = 4
"""Columns of each component."""

Replay = Callable[[], None]
Progress = Callable[[float], None]


class Capture(Protocol):
    """From work to a way to have it done again, on the same memory."""

    def __call__(self, work: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """Graphs that share their memory: only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Replay:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work()  # whatever is compiled or allocated once
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads copy pages meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class GraphForward:
    def __init__(
        self,
        forward: DenseForward,
        bridge: AttentionBridge,
        backends: Mapping[str, TritonAttention],
        *,
        max_batch: int,
        max_pages: int,
        capture: Capture,
        progress: Progress | None = None,
    ) -> None:
        """`backends`: those of the bridge. `max_batch`: sequences in the largest graph; `max_pages`
        of one sequence. Captures."""
        self._forward = forward
        self._bridge = bridge
        self._backends = backends
        self._sizes = batch_sizes(max_batch)
        self._logits = forward.new_logits(max_batch)
        self._block = _Block(list(backends), max_batch, max_pages, self._logits.device)
        self._replays: dict[int, Replay] = {}
        began = time.perf_counter()
        for done, size in enumerate(reversed(self._sizes)):  # the first makes room for the others
            if progress is not None:
                progress(done / len(self._sizes))
            self._replays[size] = capture(self._work(size))
        _logger.info(
            "%d graphs of up to %d sequences captured in %.1f s",
            len(self._sizes),
            max_batch,
            time.perf_counter() - began,
        )

    @property
    def failed(self) -> Mapping[OperationId, str]:
        return self._bridge.failed

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        segments = batch.segments
        if all(segment.follows < 0 for segment in segments):
            drawn = None
        if len(segments) > self._sizes[-1] or not all(map(_decodes, segments)):
            return self._forward.logits(batch, drawn)
        tables = {
            component: columns(segments, self._bridge.page_size, self._bridge.windows[component])
            for component in self._block.components
        }
        if not self._block.takes(tables, drawn):
            return self._forward.logits(batch, drawn)
        self._bridge.forget()
        size = next(size for size in self._sizes if size >= len(segments))
        splits = {
            component: backend.split(tables[component].lengths, backend.max_splits(size))
            for component, backend in self._backends.items()
        }
        self._block.fill(segments, tables, splits, drawn)
        self._replays[size]()
        return self._logits[: len(segments)]

    def _work(self, size: int) -> Callable[[], None]:
        block = self._block
        plans = {
            component: backend.decoding(*block.tables(component, size, backend.max_splits(size)))
            for component, backend in self._backends.items()
        }

        @torch.inference_mode()
        def work() -> None:
            self._bridge.enter(plans, set())
            self._forward.compute(block.inputs(size), self._logits[:size])

        return work


def batch_sizes(largest: int) -> list[int]:
    """Those worth a graph, rising: little is wasted on sequences that are not there."""
    steps = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, largest, 32))
    return [*(size for size in steps if size < largest), largest]


def _decodes(segment: Segment) -> bool:
    return len(segment.tokens) == 4 and segment.row is not None and not segment.loads


class _Block:
    """The memory that graphs read."""

    def __init__(
        self, components: Sequence[str], max_batch: int, max_pages: int, device: torch.device
    ) -> None:
        self.components = components
        self._capacity = max_batch
        self._columns = (4 + _OWN * len(components)) * max_batch
        size = self._columns + len(components) * max_batch * max_pages
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._ones = torch.ones_like(self._rows)
        for component in components:
            self._there[self._place(component, 0)] = -1

    def inputs(self, size: int) -> Inputs:
        """Its first operation: launched anew in every graph."""
        capacity, there = self._capacity, self._there
        known = there[: 2 * capacity]
        sources = there[2 * capacity : 2 * capacity + size]
        positions = there[3 * capacity : 3 * capacity + size]
        return Inputs(known.index_select(0, sources), positions, None)

    def tables(self, component: str, size: int, max_splits: int) -> tuple[torch.Tensor, Tables]:
        """Slots and tables of the first so many sequences."""
        slots, lengths, firsts, split = (
            self._there[self._place(component, which)][:size] for which in range(_OWN)
        )
        rows, ones, pages = self._rows[:size], self._ones[:size], self._there[self._columns :]
        return slots, Tables(rows, ones, lengths, firsts, pages, split, max_splits)

    def takes(self, tables: Mapping[str, Columns], drawn: torch.Tensor | None) -> bool:
        num_pages = sum(len(table.pages) for table in tables.values())
        fits = self._columns + num_pages <= len(self._there)
        return fits and (drawn is None or len(drawn) <= self._capacity)

    def fill(
        self,
        segments: Sequence[Segment],
        tables: Mapping[str, Columns],
        splits: Mapping[str, int],
        drawn: torch.Tensor | None,
    ) -> None:
        capacity, count = self._capacity, len(segments)
        size = self._columns + sum(len(table.pages) for table in tables.values())
        # torch does not lend this memory again before the copy out of it has happened.
        pinned = self._there.device.type == "cuda"
        staging = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        block = staging.numpy()
        block[: self._columns] = 0
        block[:count] = np.frombuffer(b"".join(segment.tokens for segment in segments), "<i4")
        follows = np.fromiter((segment.follows for segment in segments), np.int32, count)
        places = np.arange(count)
        block[2 * capacity : 2 * capacity + count] = np.where(
            follows < 0, places, follows + capacity
        )
        starts = (segment.start for segment in segments)
        block[3 * capacity : 3 * capacity + count] = np.fromiter(starts, np.int32, count)
        first = 0
        for component, table in tables.items():
            slots, lengths, firsts, split = (
                block[self._place(component, which)] for which in range(_OWN)
            )
            split[0] = splits[component]
            slots[:count], slots[count:] = table.slots, -1
            lengths[:count] = table.lengths
            firsts[:count] = table.firsts + first
            place = self._columns + first
            block[place : place + len(table.pages)] = table.pages
            first += len(table.pages)
        self._there[:size].copy_(staging, non_blocking=True)
        if drawn is not None:
            self._there[capacity : capacity + len(drawn)].copy_(drawn)

    def _place(self, component: str, which: int) -> slice:
        """Of a component's column. 0: slots, 1: lengths, 2: firsts, 3: split."""
        first = (4 + _OWN * self.components.index(component) + which) * self._capacity
        return slice(first, first + self._capacity)
