"""DmaMover: the device's own copy engines, which need no compute units.

A page is contiguous on the host and one row of every plane on the device, so some layers of a page
are a rectangle: planes × chunk. One command moves one rectangle. Knows the driver's two calls that
torch has no name for, and addresses; no streams but the current one.
"""

from __future__ import annotations

import ctypes
import itertools
from functools import cache
from typing import Any

import numpy as np
import torch

from quire.errors import ConfigError, WorkerError
from quire.memory.device import DevicePool
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, Launch, Pages

_RECTANGLE_BYTES = 1 << 20
"""Of a command at least: less, and what comes between two of them is felt."""
_MAX_PITCH_BYTES = (1 << 31) - 1
_HOST, _DEVICE = 1, 2

_SIDE = [("x", "u8"), ("y", "u8"), ("kind", "u4"), ("_", "u4")]
_SIDE += [("host", "u8"), ("device", "u8"), ("array", "u8"), ("pitch", "u8")]
_COMMAND = np.dtype([("source", _SIDE), ("target", _SIDE), ("width", "u8"), ("height", "u8")])
"""CUDA_MEMCPY2D of the driver."""


class DmaMover:
    kind = MoverKind.DMA

    def __init__(self, ends: Ends, *, to_device: bool) -> None:
        """Raises ConfigError where it cannot serve."""
        pool, layout = ends.device, ends.device.layout
        self._to_device = to_device
        self._num_layers = layout.num_layers
        self._layer_rows = layout.num_planes
        self._chunk_bytes = layout.chunk_bytes
        self._host_address = ends.host.data_ptr()
        self._host_stride = layout.page_stride_bytes
        self._device_address = pool.words(0)[0].data_ptr()
        self._pitch = _plane_pitch(pool)
        self._copy = _driver().cuMemcpy2DAsync_v2

    def layers_at_once(self, num_pages: int) -> int:
        return -(-_RECTANGLE_BYTES // (self._layer_rows * self._chunk_bytes))

    def plan(self, device_pages: Pages, host_pages: Pages) -> Launch:
        commands = np.zeros(len(host_pages), _COMMAND)
        host, device = ("source", "target") if self._to_device else ("target", "source")
        commands[host]["kind"], commands[device]["kind"] = _HOST, _DEVICE
        commands[host]["pitch"], commands[device]["pitch"] = self._chunk_bytes, self._pitch
        commands["width"] = self._chunk_bytes
        first_host = self._host_address + host_pages.astype(np.int64) * self._host_stride
        first_device = self._device_address + device_pages.astype(np.int64) * self._chunk_bytes

        def launch(layers: range) -> None:
            row = layers.start * self._layer_rows
            commands[host]["host"] = first_host + row * self._chunk_bytes
            commands[device]["device"] = first_device + row * self._pitch
            commands["height"] = len(layers) * self._layer_rows
            self._issue(commands)

        return launch

    def _issue(self, commands: np.ndarray[Any, Any]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        first, size = commands.ctypes.data, _COMMAND.itemsize
        for address in range(first, first + len(commands) * size, size):
            code = self._copy(address, stream)
            if code:
                raise WorkerError(f"the device's copy engine refused a copy (CUDA error {code})")


def _plane_pitch(pool: DevicePool) -> int:
    """Bytes from each plane of the device's pool to the next."""
    planes = [plane for layer in range(pool.layout.num_layers) for plane in pool.words(layer)]
    addresses = [plane.data_ptr() for plane in planes]
    pitches = {after - before for before, after in itertools.pairwise(addresses)}
    if len(pitches) > 1 or not all(plane.is_contiguous() for plane in planes):
        raise ConfigError("needs planes that are evenly spaced on the device")
    pitch = pitches.pop() if pitches else pool.layout.chunk_bytes
    if not pool.layout.chunk_bytes <= pitch <= _MAX_PITCH_BYTES:
        raise ConfigError(f"planes are {pitch} bytes apart, more than it can step")
    return pitch


@cache
def _driver() -> ctypes.CDLL:
    """Raises ConfigError."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the driver's library cannot be used ({error})") from error
    return library
