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
from quire.transfer.base import Copy
from quire.transfer.reference import (
    Direction,
    Side,
    TorchCopyEngine,
    copy_rows,
    copy_runs,
    runs,
)
from quire.types import page_array

_STAGING_BYTES = 1 << 20
_MIN_RUN = 4
"""Pages per run, on average, from which copying run by run is faster than gathering."""


class CpuCopyEngine(TorchCopyEngine):
    def __init__(self, device: DevicePool, host: HostPool) -> None:
        layers = range(device.layout.num_layers)
        super().__init__(
            [device.words(layer) for layer in layers],
            [host.words(layer) for layer in layers],
            _CpuDirection("load", device, _STAGING_BYTES),
            _CpuDirection("backup", device, _STAGING_BYTES),
        )


class _CpuDirection(Direction):
    def start(self, source: Side, target: Side) -> Copy:
        copy = Copy(len(source.planes))
        self._submit(copy, lambda: self._move(copy, source, target))
        return copy

    def _move(self, copy: Copy, source: Side, target: Side) -> None:
        started = time.monotonic()
        move = self._mover(page_array(source.pages), page_array(target.pages))
        for planes_from, planes_to in zip(source.planes, target.planes, strict=True):
            for plane_from, plane_to in zip(planes_from, planes_to, strict=True):
                move(plane_from, plane_to)
            copy.seconds = time.monotonic() - started
            copy.layer_moved()

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
