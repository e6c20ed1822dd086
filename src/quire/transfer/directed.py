"""What all engines are made of: a thread per direction, and gather and scatter by torch. Knows
tensors and threads; no streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.transfer.base import Copy
from quire.types import PageIds


class Direction(ABC):
    """Loads or backups, and their thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"quire-{name}")

    @abstractmethod
    def start(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
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


class DirectedEngine:
    """A CopyEngine of two directions."""

    def __init__(
        self,
        loads: Direction,
        backups: Direction,
        how: str,
        *,
        load_pages: int,
        backup_pages: int = 1,
    ) -> None:
        self._loads = loads
        self._backups = backups
        self.how = how
        self.load_pages = load_pages
        self.backup_pages = backup_pages

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Copy:
        return self._loads.start(device_pages, host_pages)

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        return self._backups.start(device_pages, host_pages)

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


def cut_runs(runs: Sequence[Rows], target_slice: int) -> list[Rows]:
    """No run crosses from one slice of so many target rows into the next."""
    found = []
    for source, target, length in runs:
        done = 0
        while done < length:
            left_in_slice = target_slice - (target + done) % target_slice
            some = min(length - done, left_in_slice)
            found.append(Rows(source + done, target + done, some))
            done += some
    return found


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
