"""Movers by the device's own copy engines, which need no compute units.

    RectangleMover   some layers of a page are a rectangle: contiguous on the host, and on the
                     device one row of each plane. So are many pages of one plane, if they follow
                     each other on both sides. One command each, and 3 µs between two of them.
    PieceMover       one piece per page and plane, all of a layer in one call, which the engines
                     take in any order and without a stop; each costs the launching thread 0.5 µs.

On an H200, of a plain copy: rectangles of whole pages 90 % at 2.4 MB and 97 % at 9.4 MB, of
layers 95 % at 4 MB and 92 % at 2 MB; pieces 98 % at 128 KiB (loads; backups 71–93 %) and 54–70 % at
32 KiB. Neither several streams nor many rectangles in one call of the driver did help.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ConfigError
from quire.memory.device import DevicePool
from quire.transfer.directed import Rows, cut_runs, runs
from quire.transfer.driver import (
    DEVICE,
    HOST,
    MAX_PITCH_BYTES,
    RECTANGLE,
    Rectangles,
    copy_pieces,
    copy_rectangles,
    piece_copy,
    rectangle_copy,
)
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, Move, PageNumbers

Numbers = npt.NDArray[np.signedinteger[Any]]

_RECTANGLE_BYTES = 4 << 20
"""At least, unless a page is smaller: less, and what comes between two of them is felt."""
_LAUNCH_BYTES = 4 << 20
"""Of pieces, per call at least."""


class RectangleMover:
    kind = MoverKind.RECTANGLES

    def __init__(
        self, ends: Ends, *, to_device: bool, rectangle_bytes: int = _RECTANGLE_BYTES
    ) -> None:
        """Raises ConfigError where it cannot serve."""
        pool, layout = ends.device, ends.device.layout
        rectangle_copy()
        self._ends = ends  # what the addresses below are of
        self._to_device = to_device
        self._num_layers = layout.num_layers
        self._rows = layout.num_planes
        self._chunk_bytes = layout.chunk_bytes
        self._rectangle_bytes = rectangle_bytes
        self._host_address = ends.host.data_ptr()
        self._host_stride = layout.page_stride_bytes
        self._device_address = pool.words(0)[0].data_ptr()
        self._pitch = _plane_pitch(pool)

    def plan(self, device_pages: PageNumbers, host_pages: PageNumbers) -> Move:
        stream = torch.cuda.current_stream().cuda_stream
        pieces = runs(device_pages, host_pages)
        if self._ends.slice_pages is not None:
            pieces = cut_runs(pieces, self._ends.slice_pages)
        if len(host_pages) * self._chunk_bytes >= self._rectangle_bytes * max(1, len(pieces)):
            launch = partial(self._planes_of_runs, pieces)
            group = 1
        else:
            launch = partial(self._layers_of_pages, device_pages, host_pages)
            groups = self._num_layers * self._rows * self._chunk_bytes // self._rectangle_bytes
            group = -(-self._num_layers // max(1, groups))
        return Move(lambda layers: copy_rectangles(launch(layers), stream), group)

    def _layers_of_pages(
        self, device_pages: PageNumbers, host_pages: PageNumbers, layers: range
    ) -> Rectangles:
        """One per page: a row is a plane."""
        row = layers.start * self._rows
        found, host, device = self._rectangles(len(host_pages))
        host["host"] = self._on_host(host_pages, row)
        host["pitch"] = self._chunk_bytes
        device["device"] = self._on_device(device_pages, row)
        device["pitch"] = self._pitch
        found["height"] = len(layers) * self._rows
        return found

    def _planes_of_runs(self, pieces: Sequence[Rows], layers: range) -> Rectangles:
        """One per run and plane: a row is a page."""
        planes = np.arange(layers.start * self._rows, layers.stop * self._rows)[:, None]
        first_device, first_host, length = np.array(pieces, dtype=np.int64).T
        found, host, device = self._rectangles(planes.size * len(pieces))
        host["host"] = self._on_host(first_host, planes).ravel()
        host["pitch"] = self._host_stride
        device["device"] = self._on_device(first_device, planes).ravel()
        device["pitch"] = self._chunk_bytes
        found["height"] = np.tile(length, planes.size)
        return found

    def _rectangles(self, count: int) -> tuple[Rectangles, Rectangles, Rectangles]:
        """All of them, and their two sides: the host's and the device's."""
        found = np.zeros(count, RECTANGLE)
        names = ("source", "target") if self._to_device else ("target", "source")
        host, device = (found[name] for name in names)
        host["kind"], device["kind"] = HOST, DEVICE
        found["width"] = self._chunk_bytes
        return found, host, device

    def _on_host(self, pages: Numbers, row: int | Numbers) -> Numbers:
        """Addresses."""
        page_bytes = pages.astype(np.int64) * self._host_stride
        return self._host_address + page_bytes + row * self._chunk_bytes

    def _on_device(self, pages: Numbers, row: int | Numbers) -> Numbers:
        """Addresses."""
        page_bytes = pages.astype(np.int64) * self._chunk_bytes
        return self._device_address + page_bytes + row * self._pitch


class PieceMover:
    kind = MoverKind.PIECES

    def __init__(self, ends: Ends, *, to_device: bool) -> None:
        """Raises ConfigError where it cannot serve."""
        pool, layout = ends.device, ends.device.layout
        piece_copy()
        planes = [plane for layer in range(layout.num_layers) for plane in pool.words(layer)]
        if not all(plane.is_contiguous() for plane in planes):
            raise ConfigError("needs planes that are contiguous on the device")
        self._ends = ends  # what the addresses below are of
        self._to_device = to_device
        self._layer_rows = layout.num_planes
        self._chunk_bytes = layout.chunk_bytes
        self._host_stride = layout.page_stride_bytes
        # Of each plane, [planes, 1], to be added to pages.
        self._device_planes = np.array([[plane.data_ptr()] for plane in planes], dtype=np.int64)
        self._host_planes = ends.host.data_ptr() + (
            np.arange(len(planes), dtype=np.int64)[:, None] * layout.chunk_bytes
        )

    def plan(self, device_pages: PageNumbers, host_pages: PageNumbers) -> Move:
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

        layer_bytes = max(1, len(host_pages)) * self._layer_rows * self._chunk_bytes
        return Move(launch, -(-_LAUNCH_BYTES // layer_bytes))


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
