"""What both torch engines are made of: one thread per direction, which moves layer after layer by
gather and scatter. Knows tensors and threads; no streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.device import DevicePool, word_dtype
from quire.transfer.base import Copy
from quire.types import PageIds

Planes = Sequence[tuple[torch.Tensor, ...]]
"""Per layer, per plane: [num_pages, chunk words]."""


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a copy: a pool's planes and which of its pages, in order."""

    planes: Planes
    pages: PageIds


class Direction(ABC):
    """Loads or backups: their thread, and the buffer that only this thread uses. The buffer is
    kept, since touching fresh memory costs as much as the copy itself."""

    def __init__(self, name: str, device: DevicePool, max_bytes: int) -> None:
        """The buffer is [rows, chunk words]: up to a row per page, `max_bytes` or one row."""
        layout = device.layout
        rows = max(1, min(device.num_pages, max_bytes // layout.chunk_bytes))
        words = layout.chunk_bytes // layout.word_bytes
        self._staging = torch.empty(rows, words, dtype=word_dtype(layout), device=device.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"quire-{name}")

    @abstractmethod
    def start(self, source: Side, target: Side) -> Copy:
        """Called on the step's thread; `_submit` does the rest on the direction's."""

    def close(self) -> None:
        self._thread.shutdown()

    def _submit(self, copy: Copy, move: Callable[[], None]) -> None:
        def run() -> None:
            try:
                move()
            except Exception as error:  # thread boundary: this one copy fails, the engine lives on
                copy.fail(error)

        self._thread.submit(run)


class TorchCopyEngine:
    def __init__(self, device: Planes, host: Planes, loads: Direction, backups: Direction) -> None:
        self._device = device
        self._host = host
        self._loads = loads
        self._backups = backups

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Copy:
        return self._loads.start(Side(self._host, host_pages), Side(self._device, device_pages))

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        return self._backups.start(Side(self._device, device_pages), Side(self._host, host_pages))

    def close(self) -> None:
        self._loads.close()
        self._backups.close()


class Rows(NamedTuple):
    """Rows [source, source + length) that go to [target, target + length)."""

    source: int
    target: int
    length: int


def runs(source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> list[Rows]:
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
        Rows(int(source[first]), int(target[first]), last - first)
        for first, last in zip(starts, ends, strict=True)
    ]


def copy_runs(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Rows]) -> None:
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
