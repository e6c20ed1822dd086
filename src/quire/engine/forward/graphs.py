"""GraphForward: batches of few tokens, replayed as CUDA graphs; all others as they come.

A graph is a fixed sequence of kernels on fixed memory. One is captured for each of a few kinds of
batches; a batch takes the smallest that holds it:

    decoding    one token of each sequence, and all of their logits
    verifying   one token of each sequence and what is proposed after it, and all of their logits
    short       up to some tokens of a few sequences: the ends of prompts whose pages are there,
                alone or beside others that decode. Attention gets them in pieces

What differs from step to step is brought to the device by block.py.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from quire.engine.attention.columns import Column, columns
from quire.engine.attention.triton import PIECE, TritonAttention
from quire.engine.batch import Batch, Segment
from quire.engine.bridge import AttentionBridge
from quire.engine.forward.base import Capturable
from quire.engine.forward.block import Block, Group, Pieces, cut
from quire.types import NO_SLOT, OperationId

_FEW = 4
"""Prompts that end together."""
_SHORT = (16, 32, 64, 128)
_BESIDE = (128, 256)
"""Tokens of short batches, without and with others that decode."""
_MAX_PARTS = 192
"""Pieces times splits: more would need more memory for what is put together again."""

_LOADED_BYTES = 512 << 20
"""That a batch may still wait for: they come in less time than its launches would take one by one.
What takes longer is waited for layer by layer, between those launches."""

Replay = Callable[[], None]


class Capture(Protocol):
    """From work to a way to have it done again, on the same memory."""

    def __call__(self, work: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """Graphs that share their memory: only one runs at a time."""

    def __init__(self, *, is_careful: bool = False) -> None:
        """`is_careful`: work that waits for the device is refused, with a RuntimeError, before its
        capture has begun: one that fails leaves memory behind."""
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._is_careful = is_careful

    def __call__(self, work: Callable[[], None]) -> Replay:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work()  # whatever is compiled or allocated once
            if self._is_careful:
                with _never_waiting():
                    work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads copy pages meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


@contextlib.contextmanager
def _never_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is new in torch
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class GraphKind(NamedTuple):
    """A batch that fits has as many of each, or fewer."""

    num_tokens: int
    num_single: int
    """Sequences with one token. 0: they count as short ones."""
    num_short: int
    """Sequences with several tokens; 0: it only decodes, and all logits are wanted."""
    splits: bool = True
    """Sequences are split. With many of about the same length that is not worth a kernel more."""
    verifies: bool = False
    """The short ones are tokens to check: all logits are wanted."""

    @property
    def num_sequences(self) -> int:
        return self.num_single + self.num_short

    @property
    def num_rows(self) -> int:
        """Whose logits are wanted."""
        return self.num_tokens if self.verifies else self.num_sequences

    @property
    def piece(self) -> int:
        """Tokens that attention gets together, at most."""
        if self.verifies:
            return self.num_tokens // self.num_short
        return min(PIECE, self.num_tokens) if self.num_short else 1

    @property
    def num_pieces(self) -> int:
        """Of the short ones."""
        if self.verifies:
            return self.num_short  # each is one, or less
        return self.num_tokens // self.piece + self.num_short if self.num_short else 0

    @property
    def num_entries(self) -> int:
        return self.num_single + self.num_pieces

    @property
    def width(self) -> int:
        """Of the columns that it reads."""
        return max(self.num_tokens, self.num_entries)

    def holds(self, num_tokens: int, num_single: int, num_short: int) -> bool:
        if not self.num_single:
            num_single, num_short = 0, num_single + num_short
        asked = (num_tokens, num_single, num_short)
        return all(n <= most for n, most in zip(asked, self[:3], strict=True))

    def places(self, pieces: Pieces) -> Column:
        """The entry of each piece: single ones first, if they have a table of their own."""
        if not (self.num_single and self.num_short):
            return np.arange(len(pieces.rows), dtype=np.int32)
        single = pieces.is_single
        others = np.cumsum(~single, dtype=np.int32) + (self.num_single - 1)
        return np.where(single, np.cumsum(single, dtype=np.int32) - 1, others)


class GraphForward:
    def __init__(
        self,
        forward: Capturable,
        bridge: AttentionBridge,
        backends: Mapping[str, TritonAttention],
        *,
        max_batch: int,
        max_pages: int,
        capture: Capture,
        progress: Callable[[float], None] | None = None,
        max_drafts: int = 0,
    ) -> None:
        """`backends`: those of the bridge. `max_batch`: sequences in the largest graph; `max_pages`
        of one sequence; `max_drafts`: tokens proposed for one. Captures."""
        self._forward = forward
        self.capture = capture
        self._bridge = bridge
        self._backends = backends
        self._token_bytes = sum(backend.token_bytes for backend in backends.values())
        self._sizes = batch_sizes(max_batch)
        self._short = short_kinds(max_batch) if forward.packs else []
        self._verifying = [
            GraphKind(size * (1 + max_drafts), 0, size, verifies=True) for size in self._sizes
        ]
        if not max_drafts:
            self._verifying = []
        kinds = [*self._decoding(), *self._verifying, *self._short]
        self._logits = forward.new_logits(max(kind.num_rows for kind in kinds))
        self._block = Block(
            list(backends),
            max(kind.width for kind in kinds),
            len(backends) * max_batch * max_pages,
            self._logits.device,
        )
        self._groups = {kind: self._tables(kind) for kind in kinds}
        self._replays: dict[GraphKind, Replay] = {}
        self.replayed: GraphKind | None = None
        """Which of them the last batch was; None: it was not replayed."""
        # The largest first: it makes room for the others.
        for kind in sorted(kinds, reverse=True):
            if progress is not None:
                progress(len(self._replays) / len(kinds))
            self._replays[kind] = capture(self._work(kind))

    @property
    def num_graphs(self) -> int:
        return len(self._replays)

    @property
    def features(self) -> torch.Tensor:
        return self._forward.features

    def features_of(self, num_tokens: int) -> torch.Tensor:
        """Of the last batch that was replayed with so many, on memory that stays."""
        self._forward.after_replay(num_tokens)
        return self._forward.features

    @property
    def block(self) -> Block:
        """What the last batch replayed was, on the device."""
        return self._block

    def drawing(self) -> list[GraphKind]:
        """Those after whose tokens all logits are wanted."""
        return [kind for kind in self._replays if kind.verifies or not kind.num_short]

    def groups(self, kind: GraphKind) -> list[Group]:
        return self._groups[kind]

    def enter(self, kind: GraphKind) -> None:
        """Prepare the bridge for its tokens."""
        self._bridge.enter(self._plans(kind), set())

    @property
    def failed(self) -> Mapping[OperationId, str]:
        return self._bridge.failed

    def logits(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        segments = batch.segments
        if all(segment.follows < 0 for segment in segments):
            drawn = None
        kind = self._kind_of(segments)
        self.replayed = None
        if kind is None:
            return self._forward.logits(batch, drawn)
        tables = {
            component: columns(segments, self._bridge.page_size, self._bridge.windows[component])
            for component in self._block.components
        }
        if not self._block.takes(tables, drawn):
            return self._forward.logits(batch, drawn)
        self._bridge.forget()
        pieces = cut(segments, kind.piece)
        places = kind.places(pieces)
        lengths = {component: pieces.lengths(table) for component, table in tables.items()}
        splits = {
            component: self._splits(kind, component, places, lengths[component])
            for component in lengths
        }
        self._block.fill(segments, pieces, places, tables, splits, width=kind.width)
        if drawn is not None:
            self._block.follow(drawn)
        if not kind.num_short and self._fills(kind.num_single):
            is_even = all(splits[name][0] >= lengths[name].max() for name in splits)
            kind = kind._replace(splits=not is_even)
        self._bridge.wait_for_all({op for segment in segments for op in segment.loads})
        self._replays[kind]()
        self.replayed = kind
        self._forward.after_replay(batch.num_tokens)
        return self._logits[: sum(segment.num_rows for segment in segments)]

    def _kind_of(self, segments: Sequence[Segment]) -> GraphKind | None:
        """The smallest that holds them; None: there is none. No graph waits for what is loaded
        layer by layer; nor does one begin, restore or save a state, or verify a tree."""
        loaded = sum(segment.start for segment in segments if segment.loads)
        is_tree = any(segment.branches for segment in segments)
        if is_tree or loaded * self._token_bytes > _LOADED_BYTES:
            return None
        if not self._forward.packs and (loaded or any(map(_moves_state, segments))):
            return None
        count, num_bytes = len(segments), sum(len(segment.tokens) for segment in segments)
        num_tokens = num_bytes >> 2
        if num_tokens == count and all(segment.row is not None for segment in segments):
            size = next((size for size in self._sizes if size >= count), None)
            return None if size is None else GraphKind(size, size, 0)
        if any(segment.drafts for segment in segments):
            if any(segment.num_rows < len(segment.tokens) >> 2 for segment in segments):
                return None
            longest = max(len(segment.tokens) for segment in segments) >> 2  # a prompt is longer
            verifying = (kind for kind in self._verifying if kind.piece >= longest)
            return next((kind for kind in verifying if kind.num_short >= count), None)
        single = sum(len(segment.tokens) == 4 for segment in segments)
        fits = (kind for kind in self._short if kind.holds(num_tokens, single, count - single))
        return next(fits, None)

    def _decoding(self) -> Iterator[GraphKind]:
        for size in self._sizes:
            yield GraphKind(size, size, 0)
            if self._fills(size):
                yield GraphKind(size, size, 0, splits=False)

    def _fills(self, size: int) -> bool:
        return all(backend.fills(size) for backend in self._backends.values())

    def _tables(self, kind: GraphKind) -> list[Group]:
        tables = [
            (0, kind.num_single, 1),
            (kind.num_single, kind.num_pieces, kind.piece),
        ]
        return [
            Group(first, size, count, self._max_splits(kind, size, count))
            for first, size, count in tables
            if size
        ]

    def _max_splits(self, kind: GraphKind, size: int, count: int) -> dict[str, int]:
        """Of a table with so many entries, of so many tokens at most: powers of two."""
        if not kind.splits:
            return dict.fromkeys(self._backends, 1)
        found = {name: backend.max_splits(size) for name, backend in self._backends.items()}
        if count == 1:
            return found
        most = 1 << (max(1, _MAX_PARTS // size).bit_length() - 1)
        return {name: min(most, splits) for name, splits in found.items()}

    def _splits(
        self, kind: GraphKind, component: str, places: Column, lengths: Column
    ) -> list[int]:
        """After how many tokens each table's sequences are split."""
        found = []
        for group in self._groups[kind]:
            own = lengths[(places >= group.first) & (places < group.first + group.size)]
            most = group.max_splits[component]
            found.append(self._backends[component].split(own, most) if len(own) else 0)
        return found

    def _work(self, kind: GraphKind) -> Callable[[], None]:
        block = self._block
        num_rows = kind.num_sequences if kind.num_short and not kind.verifies else None

        @torch.inference_mode()
        def work() -> None:
            self.enter(kind)
            inputs = block.inputs(kind.num_tokens, num_rows)
            self._forward.compute(inputs, self._logits[: kind.num_rows])

        return work

    def _plans(self, kind: GraphKind) -> dict[str, Any]:
        block, groups = self._block, self._groups[kind]
        return {
            component: backend.planned(
                block.slots(component, kind.num_tokens), block.tables(component, groups)
            )
            for component, backend in self._backends.items()
        }


def _moves_state(segment: Segment) -> bool:
    return not segment.start or segment.restore != NO_SLOT or segment.save != NO_SLOT


def batch_sizes(largest: int) -> list[int]:
    """Those worth a graph, rising: little is wasted on sequences that are not there."""
    steps = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, largest, 32))
    return [*(size for size in steps if size < largest), largest]


def short_kinds(max_batch: int) -> list[GraphKind]:
    """Rising, as `batch_sizes`."""
    few = min(_FEW, max_batch)
    kinds = [GraphKind(num_tokens, 0, few) for num_tokens in _SHORT]
    if max_batch > few:
        kinds += [GraphKind(num_tokens, max_batch, few) for num_tokens in _BESIDE]
    return sorted(kinds)
