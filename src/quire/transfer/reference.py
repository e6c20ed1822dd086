"""What both torch engines are made of: one thread per direction, which moves layer after layer by
gather and scatter. Knows tensors and threads; no streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import WorkerError
from quire.memory.device import DevicePool, word_dtype
from quire.transfer.base import CopyState
from quire.types import PageIds

Planes = Sequence[tuple[torch.Tensor, ...]]
"""Per layer, per plane: [num_pages, chunk words]."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a copy: a pool's planes and which of its pages, in order."""

    planes: Planes
    pages: PageIds


class LayerCopy:
    """A copy that a thread of its engine moves, or launches, layer by layer."""

    def __init__(self, num_layers: int) -> None:
        self.error = ""
        self.seconds = 0.0
        self._num_layers = num_layers
        self._num_moved = 0
        self._changed = threading.Condition()

    @property
    def state(self) -> CopyState:
        if self.error:
            return CopyState.FAILED
        return CopyState.DONE if self._num_moved == self._num_layers else CopyState.RUNNING

    def layer_done(self, layer: int) -> bool:
        return self._num_moved > layer

    def wait_layer(self, layer: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_moved > layer or self.error)
        if self._num_moved <= layer:
            raise WorkerError(f"copy failed before layer {layer} arrived: {self.error}")

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_moved == self._num_layers or self.error)
        if self.error:
            raise WorkerError(f"copy failed: {self.error}")

    def layer_moved(self) -> None:
        with self._changed:
            self._num_moved += 1
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        with self._changed:
            self.error = f"{type(error).__name__}: {error}"
            self._changed.notify_all()


class Direction:
    """Loads or backups: their thread, and the buffer that only this thread uses. The buffer is
    kept, since touching fresh memory costs as much as the copy itself."""

    def __init__(self, name: str, device: DevicePool, max_bytes: int) -> None:
        """The buffer is [rows, chunk words]: up to a row per page, `max_bytes` or one row."""
        layout = device.layout
        rows = max(1, min(device.num_pages, max_bytes // layout.chunk_bytes))
        words = layout.chunk_bytes // layout.word_bytes
        self.staging = torch.empty(rows, words, dtype=word_dtype(layout), device=device.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"quire-{name}")

    def submit(self, copy: LayerCopy, move: Callable[[], None]) -> None:
        def run() -> None:
            try:
                move()
            except Exception as error:  # thread boundary: this one copy fails, the engine lives on
                copy.fail(error)

        self._thread.submit(run)

    def close(self) -> None:
        self._thread.shutdown()


class Run(NamedTuple):
    """Rows [source, source + length) that go to [target, target + length)."""

    source: int
    target: int
    length: int


def runs(source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> list[Run]:
    """The pairs as runs, in the order of their sources.

    Pages are often handed out and given back in order, forwards or backwards: then a copy of
    hundreds of pages is a few runs, and needs no gathering.
    """
    if not len(source):
        return []
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(source)]
    return [
        Run(int(source[first]), int(target[first]), last - first)
        for first, last in zip(starts, ends, strict=True)
    ]


def copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Run]) -> None:
    """Row by row as the runs say, without a stop in between."""
    for first, to, length in runs:
        target[to : to + length].copy_(source[first : first + length])


def copy_rows(
    source: torch.Tensor,
    from_index: torch.Tensor,
    target: torch.Tensor,
    to_index: torch.Tensor,
    staging: torch.Tensor,
) -> None:
    """target[to_index] = source[from_index], at most a staging buffer at a time."""
    for start in range(0, len(from_index), len(staging)):
        wanted = from_index[start : start + len(staging)]
        rows = staging[: len(wanted)]
        torch.index_select(source, 0, wanted, out=rows)
        target.index_copy_(0, to_index[start : start + len(staging)], rows)
