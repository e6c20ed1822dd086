"""CpuCopyEngine: the torch reference on a machine without an accelerator.

Knows index operations and one thread per direction, so that a copy runs beside the step (torch
lets go of the GIL while it copies). Pages that follow each other on both sides are copied run by
run. Scattered ones are gathered, per (layer, plane), into a small staging buffer that stays in the
CPU's cache, and scattered from there: two torch calls for many pages, where a direct copy would
cost one call per page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import WorkerError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.transfer.base import CopyState
from quire.transfer.reference import Side, copy_rows, copy_runs, runs, staging_buffer
from quire.types import PageIds, page_array

_STAGING_BYTES = 1 << 20
_MIN_RUN = 4
"""Pages per run, on average, from which copying run by run is faster than gathering."""


class CpuCopy:
    """A copy carried out by one of the engine's threads."""

    def __init__(self) -> None:
        self._layers_done = 0
        self._state = CopyState.RUNNING
        self._error = ""
        self._seconds = 0.0
        self._changed = threading.Condition()

    @property
    def state(self) -> CopyState:
        return self._state

    @property
    def error(self) -> str:
        return self._error

    @property
    def seconds(self) -> float:
        return self._seconds

    def layer_done(self, layer: int) -> bool:
        return self._layers_done > layer

    def wait_layer(self, layer: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._layers_done > layer or self._state is CopyState.FAILED
            )
            if self._layers_done <= layer:
                raise WorkerError(f"copy failed before layer {layer} arrived: {self._error}")

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._state is not CopyState.RUNNING)
        if self._state is CopyState.FAILED:
            raise WorkerError(f"copy failed: {self._error}")

    def layer_arrived(self) -> None:
        with self._changed:
            self._layers_done += 1
            self._changed.notify_all()

    def finish(self, seconds: float, error: str = "") -> None:
        with self._changed:
            self._seconds = seconds
            self._error = error
            self._state = CopyState.FAILED if error else CopyState.DONE
            self._changed.notify_all()


class _Lane:
    """One direction: its thread, and the buffer that only this thread uses. The buffer is kept,
    since touching fresh memory costs as much as the copy itself."""

    def __init__(self, name: str, device: DevicePool) -> None:
        self.staging = staging_buffer(
            device.layout, device.num_pages, _STAGING_BYTES, torch.device("cpu")
        )
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"quire-{name}")


class CpuCopyEngine:
    def __init__(
        self, device: DevicePool, host: HostPool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_layers = device.layout.num_layers
        self._device = [device.words(layer) for layer in range(self._num_layers)]
        self._host = [host.words(layer) for layer in range(self._num_layers)]
        self._clock = clock
        self._loads = _Lane("load", device)
        self._backups = _Lane("backup", device)

    def load(self, host_pages: PageIds, device_pages: PageIds) -> CpuCopy:
        source, target = Side(self._host, host_pages), Side(self._device, device_pages)
        return self._submit(self._loads, source, target)

    def backup(self, device_pages: PageIds, host_pages: PageIds) -> CpuCopy:
        source, target = Side(self._device, device_pages), Side(self._host, host_pages)
        return self._submit(self._backups, source, target)

    def close(self) -> None:
        self._loads.thread.shutdown()
        self._backups.thread.shutdown()

    def _submit(self, lane: _Lane, source: Side, target: Side) -> CpuCopy:
        copy = CpuCopy()
        lane.thread.submit(self._run, copy, lane, source, target)
        return copy

    def _mover(
        self, lane: _Lane, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """How to copy one plane to another: in runs if they are long, else gathered."""
        pieces = runs(source, target)
        if len(pieces) * _MIN_RUN <= len(source):
            return lambda plane_from, plane_to: copy_runs(plane_from, plane_to, pieces)
        from_index = torch.tensor(source, dtype=torch.int64)
        to_index = torch.tensor(target, dtype=torch.int64)
        return lambda plane_from, plane_to: copy_rows(
            plane_from, from_index, plane_to, to_index, lane.staging
        )

    def _run(self, copy: CpuCopy, lane: _Lane, source: Side, target: Side) -> None:
        started = self._clock()
        try:
            move = self._mover(lane, page_array(source.pages), page_array(target.pages))
            for planes_from, planes_to in zip(source.planes, target.planes, strict=True):
                for plane_from, plane_to in zip(planes_from, planes_to, strict=True):
                    move(plane_from, plane_to)
                copy.layer_arrived()
        except Exception as error:  # thread boundary: this one copy fails, the engine lives on
            copy.finish(self._clock() - started, f"{type(error).__name__}: {error}")
        else:
            copy.finish(self._clock() - started)
