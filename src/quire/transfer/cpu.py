"""CpuCopyEngine: the torch reference on a machine without an accelerator.

A copy runs on its direction's thread, beside the step (torch lets go of the GIL while it copies).
Pages that follow each other on both sides are copied run by run. Scattered ones are gathered, per
(layer, plane), into a small staging buffer that stays in the CPU's cache, and scattered from there:
two torch calls for many pages, where a direct copy would cost one call per page.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.device import DevicePool, word_dtype
from quire.memory.host import HostPool
from quire.memory.page_layout import PageLayout
from quire.transfer.base import Copy
from quire.transfer.directed import DirectedEngine, Direction, copy_rows, copy_runs, runs
from quire.types import PageIds, page_array

_STAGING_BYTES = 1 << 20
_LOAD_BYTES = 32 << 20
"""Some milliseconds' worth."""
_MIN_RUN = 4
"""Pages per run, on average, from which copying run by run is faster than gathering."""

Planes = tuple[torch.Tensor, ...]
"""Of one layer, each [num_pages, chunk words]."""
_Ids = npt.NDArray[np.int32]
_End = TypeVar("_End")


class CpuCopyEngine(DirectedEngine):
    def __init__(self, device: DevicePool, host: HostPool) -> None:
        layers = range(device.layout.num_layers)
        planes = [(device.words(layer), host.words(layer)) for layer in layers]
        rows = max(1, min(device.num_pages, _STAGING_BYTES // device.layout.chunk_bytes))
        super().__init__(
            _Loads("load", planes, device.parts, _staging(device.layout, rows)),
            _Backups("backup", planes, device.parts, _staging(device.layout, rows)),
            "by torch, a thread for each direction",
            load_pages=-(-_LOAD_BYTES // device.layout.page_bytes),
        )


class _CpuDirection(Direction):
    """Its buffer is kept, since touching fresh memory costs as much as the copy itself."""

    def __init__(
        self,
        name: str,
        planes: Sequence[tuple[Planes, Planes]],
        parts: Sequence[range],
        staging: torch.Tensor,
    ) -> None:
        """`planes`: by layer, of the device and of the host. `staging`: [rows, chunk words], used
        by this direction's thread only."""
        super().__init__(name)
        self._planes = planes
        self._parts = parts
        self._staging = staging

    def start(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        copy = Copy(len(self._planes))
        ids = page_array(device_pages), page_array(host_pages)
        self._submit(copy, lambda: self._move(copy, *ids))
        return copy

    @abstractmethod
    def _ends(self, device: _End, host: _End) -> tuple[_End, _End]:
        """Where from, and where to."""

    def _move(self, copy: Copy, device: _Ids, host: _Ids) -> None:
        started = time.monotonic()
        for part, layers in enumerate(self._parts):
            move = self._mover(*self._ends(device[part :: len(self._parts)], host))
            for layer in layers:
                for plane_from, plane_to in zip(*self._ends(*self._planes[layer]), strict=True):
                    move(plane_from, plane_to)
                copy.seconds = time.monotonic() - started
                copy.layers_moved(1)

    def _mover(self, source: _Ids, target: _Ids) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """How to copy one plane to another: in runs if they are long, else gathered."""
        pieces = runs(source, target)
        if len(pieces) * _MIN_RUN <= len(source):
            return lambda plane_from, plane_to: copy_runs(plane_from, plane_to, pieces)
        from_index = torch.tensor(source, dtype=torch.int64)
        to_index = torch.tensor(target, dtype=torch.int64)
        return lambda plane_from, plane_to: copy_rows(
            plane_from, from_index, plane_to, to_index, self._staging
        )


class _Loads(_CpuDirection):
    def _ends(self, device: _End, host: _End) -> tuple[_End, _End]:
        return host, device


class _Backups(_CpuDirection):
    def _ends(self, device: _End, host: _End) -> tuple[_End, _End]:
        return device, host


def _staging(layout: PageLayout, rows: int) -> torch.Tensor:
    return torch.empty(rows, layout.chunk_bytes // layout.word_bytes, dtype=word_dtype(layout))
