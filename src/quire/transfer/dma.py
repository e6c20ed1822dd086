"""Movers by the device's own copy engines, which need no compute units.

    RectangleMover   some layers of a page are a rectangle: contiguous on the host, and on the
                     device one row of each plane. One command each; best for whole pages.
    PieceMover       one piece per page and plane, all of a layer in one call, which the engines
                     take in any order; best for large pieces.

Both only launch, on the current stream.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.transfer.driver import (
    DEVICE,
    HOST,
    MAX_PITCH_BYTES,
    RECTANGLE,
    copy_pieces,
    copy_rectangles,
    piece_copy,
    rectangle_copy,
)
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, Launch, Pages

_RECTANGLE_BYTES = 1 << 20
"""At least: less, and what comes between two of them is felt."""
_STREAMS = 2
_LAUNCH_BYTES = 4 << 20
"""Of pieces, per call at least."""


class RectangleMover:
    kind = MoverKind.RECTANGLES

    def __init__(
        self,
        ends: Ends,
        *,
        to_device: bool,
        streams: int = _STREAMS,
        rectangle_bytes: int = _RECTANGLE_BYTES,
    ) -> None:
        """Raises ConfigError where it cannot serve."""
        pool, layout = ends.device, ends.device.layout
        rectangle_copy()
        self._to_device = to_device
        self._rows = layout.num_planes
        self._chunk_bytes = layout.chunk_bytes
        self._rectangle_bytes = rectangle_bytes
        self._host_address = ends.host.data_ptr()
        self._host_stride = layout.page_stride_bytes
        self._device_address = pool.words(0)[0].data_ptr()
        self._pitch = _plane_pitch(pool)
        self._helpers = [torch.cuda.Stream(pool.device) for _ in range(streams - 1)]  # type: ignore[no-untyped-call]

    def layers_at_once(self, num_pages: int) -> int:
        return -(-self._rectangle_bytes // (self._rows * self._chunk_bytes))

    def plan(self, device_pages: Pages, host_pages: Pages) -> Launch:
        found = np.zeros(len(host_pages), RECTANGLE)
        host, device = ("source", "target") if self._to_device else ("target", "source")
        found[host]["kind"], found[device]["kind"] = HOST, DEVICE
        found[host]["pitch"], found[device]["pitch"] = self._chunk_bytes, self._pitch
        found["width"] = self._chunk_bytes
        first_host = self._host_address + host_pages.astype(np.int64) * self._host_stride
        first_device = self._device_address + device_pages.astype(np.int64) * self._chunk_bytes
        main = torch.cuda.current_stream()
        for helper in self._helpers:
            helper.wait_stream(main)
        streams = [stream.cuda_stream for stream in (main, *self._helpers)]

        def launch(layers: range) -> None:
            row = layers.start * self._rows
            found[host]["host"] = first_host + row * self._chunk_bytes
            found[device]["device"] = first_device + row * self._pitch
            found["height"] = len(layers) * self._rows
            copy_rectangles(found, streams)
            for helper in self._helpers:
                main.wait_stream(helper)

        return launch


class PieceMover:
    kind = MoverKind.PIECES

    def __init__(self, ends: Ends, *, to_device: bool) -> None:
        """Raises ConfigError where it cannot serve."""
        pool, layout = ends.device, ends.device.layout
        piece_copy()
        planes = [plane for layer in range(layout.num_layers) for plane in pool.words(layer)]
        if not all(plane.is_contiguous() for plane in planes):
            raise ConfigError("needs planes that are contiguous on the device")
        self._to_device = to_device
        self._layer_rows = layout.num_planes
        self._chunk_bytes = layout.chunk_bytes
        self._host_stride = layout.page_stride_bytes
        # Of each plane, [planes, 1], to be added to pages.
        self._device_planes = np.array([[plane.data_ptr()] for plane in planes], dtype=np.int64)
        self._host_planes = ends.host.data_ptr() + (
            np.arange(len(planes), dtype=np.int64)[:, None] * layout.chunk_bytes
        )

    def layers_at_once(self, num_pages: int) -> int:
        layer_bytes = max(1, num_pages) * self._layer_rows * self._chunk_bytes
        return -(-_LAUNCH_BYTES // layer_bytes)

    def plan(self, device_pages: Pages, host_pages: Pages) -> Launch:
        on_device = device_pages.astype(np.int64) * self._chunk_bytes
        on_host = host_pages.astype(np.int64) * self._host_stride
        stream = torch.cuda.current_stream().cuda_stream

        def launch(layers: range) -> None:
            rows = slice(layers.start * self._layer_rows, layers.stop * self._layer_rows)
            there = (self._device_planes[rows] + on_device).astype(np.uint64).ravel()
            here = (self._host_planes[rows] + on_host).astype(np.uint64).ravel()
            source, target = (here, there) if self._to_device else (there, here)
            if len(source):
                copy_pieces(source, target, self._chunk_bytes, stream)

        return launch


def _plane_pitch(pool: DevicePool) -> int:
    """Bytes from each plane of the device's pool to the next."""
    planes = [plane for layer in range(pool.layout.num_layers) for plane in pool.words(layer)]
    addresses = [plane.data_ptr() for plane in planes]
    pitches = {after - before for before, after in itertools.pairwise(addresses)}
    if len(pitches) > 1 or not all(plane.is_contiguous() for plane in planes):
        raise ConfigError("needs planes that are evenly spaced on the device")
    pitch = pitches.pop() if pitches else pool.layout.chunk_bytes
    if not pool.layout.chunk_bytes <= pitch <= MAX_PITCH_BYTES:
        raise ConfigError(f"planes are {pitch} bytes apart, more than the copy engines can step")
    return pitch
