"""CpuCopyEngine: the torch reference on a machine without an accelerator.

A copy runs on its direction's thread, beside the step (torch lets go of the GIL while it copies).
Pages that follow each other on both sides are copied run by run. Scattered ones are gathered, per
(layer, plane), into a small staging buffer that stays in the CPU's cache, and scattered from there:
two torch calls for many pages, where a direct copy would cost one call per page.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.transfer.reference import (
    Direction,
    LayerCopy,
    Side,
    copy_rows,
    copy_runs,
    runs,
)
from quire.types import PageIds, page_array

_STAGING_BYTES = 1 << 20
_MIN_RUN = 4
"""Pages per run, on average, from which copying run by run is faster than gathering."""


class CpuCopyEngine:
    def __init__(
        self, device: DevicePool, host: HostPool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        layers = range(device.layout.num_layers)
        self._device = [device.words(layer) for layer in layers]
        self._host = [host.words(layer) for layer in layers]
        self._clock = clock
        self._loads = Direction("load", device, _STAGING_BYTES)
        self._backups = Direction("backup", device, _STAGING_BYTES)

    def load(self, host_pages: PageIds, device_pages: PageIds) -> LayerCopy:
        source, target = Side(self._host, host_pages), Side(self._device, device_pages)
        return self._submit(self._loads, source, target)

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> LayerCopy:
        source, target = Side(self._device, device_pages), Side(self._host, host_pages)
        return self._submit(self._backups, source, target)

    def close(self) -> None:
        self._loads.close()
        self._backups.close()

    def _submit(self, way: Direction, source: Side, target: Side) -> LayerCopy:
        copy = LayerCopy(len(self._device))
        way.submit(copy, lambda: self._move(copy, way, source, target))
        return copy

    def _move(self, copy: LayerCopy, way: Direction, source: Side, target: Side) -> None:
        started = self._clock()
        move = _mover(way, page_array(source.pages), page_array(target.pages))
        for planes_from, planes_to in zip(source.planes, target.planes, strict=True):
            for plane_from, plane_to in zip(planes_from, planes_to, strict=True):
                move(plane_from, plane_to)
            copy.seconds = self._clock() - started
            copy.layer_moved()


def _mover(
    way: Direction, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """How to copy one plane to another: in runs if they are long, else gathered."""
    pieces = runs(source, target)
    if len(pieces) * _MIN_RUN <= len(source):
        return lambda plane_from, plane_to: copy_runs(plane_from, plane_to, pieces)
    from_index = torch.tensor(source, dtype=torch.int64)
    to_index = torch.tensor(target, dtype=torch.int64)
    return lambda plane_from, plane_to: copy_rows(
        plane_from, from_index, plane_to, to_index, way.staging
    )
