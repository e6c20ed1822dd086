"""CpuCopyEngine: the torch reference on a machine without an accelerator.

A copy runs on its direction's thread, beside the step (torch lets go of the GIL while it copies).
Pages that follow each other on both sides are copied run by run. Scattered ones are gathered, per
(layer, plane), into a small staging buffer that stays in the CPU's cache, and scattered from there:
two torch calls for many pages, where a direct copy would cost one call per page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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

Planes = Sequence[tuple[torch.Tensor, ...]]
"""Per layer, per plane: [num_pages, chunk words]."""


class CpuCopyEngine(DirectedEngine):
    def __init__(self, device: DevicePool, host: HostPool) -> None:
        layers = range(device.layout.num_layers)
        device_planes = [device.words(layer) for layer in layers]
        host_planes = [host.words(layer) for layer in layers]
        rows = max(1, min(device.num_pages, _STAGING_BYTES // device.layout.chunk_bytes))
        super().__init__(
            _Loads("load", device_planes, host_planes, _staging(device.layout, rows)),
            _Backups("backup", device_planes, host_planes, _staging(device.layout, rows)),
            "by torch, a thread for each direction",
            load_pages=-(-_LOAD_BYTES // device.layout.page_bytes),
        )


class _CpuDirection(Direction):
    """Its buffer is kept, since touching fresh memory costs as much as the copy itself."""

    def __init__(self, name: str, device: Planes, host: Planes, staging: torch.Tensor) -> None:
        """`staging`: [rows, chunk words], used by this direction's thread only."""
        super().__init__(name)
        self._device = device
        self._host = host
        self._staging = staging

    def _start(self, source: Planes, target: Planes, pages: tuple[PageIds, PageIds]) -> Copy:
        copy = Copy(len(source))
        self._submit(copy, lambda: self._move(copy, source, target, pages))
        return copy

    def _move(
        self, copy: Copy, source: Planes, target: Planes, pages: tuple[PageIds, PageIds]
    ) -> None:
        started = time.monotonic()
        move = self._mover(page_array(pages[0]), page_array(pages[1]))
        for planes_from, planes_to in zip(source, target, strict=True):
            for plane_from, plane_to in zip(planes_from, planes_to, strict=True):
                move(plane_from, plane_to)
            copy.seconds = time.monotonic() - started
            copy.layers_moved(1)

    def _mover(
        self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
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
    def start(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        return self._start(self._host, self._device, (host_pages, device_pages))


class _Backups(_CpuDirection):
    def start(self, device_pages: PageIds, host_pages: PageIds) -> Copy:
        return self._start(self._device, self._host, (device_pages, host_pages))


def _staging(layout: PageLayout, rows: int) -> torch.Tensor:
    return torch.empty(rows, layout.chunk_bytes // layout.word_bytes, dtype=word_dtype(layout))
