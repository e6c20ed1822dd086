"""PageKernel: one kernel gathers from one end and scatters into the other. KernelMover: only that.

The device addresses pinned host memory as its own, so a kernel that reads here and writes there
*is* the transfer: all pages of all layers in one launch, in any order, with nothing in between.
The link is full with a few programs; more would only take compute units from the model. Knows
pools and page numbers; no streams.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from quire.memory.device import DevicePool
from quire.transfer.kinds import MoverKind
from quire.transfer.movers import Ends, Move, PageNumbers, send_pages

_PROGRAMS = 8
_BLOCK_BYTES = 32 << 10
_WARPS = 4
_LAUNCH_BYTES = 8 << 20
"""Per launch at least: what comes between two launches is nothing beside it."""


@triton.jit
def _move(
    device, host, offsets, device_pages, host_pages,
    first_plane, first_host_plane, num_pages, num_items, chunk, device_stride, host_stride,
    TO_DEVICE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """An item is BLOCK words of one (plane, page); items are dealt out to the programs in turn."""
    within = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair = item // BLOCKS
        page = pair % num_pages
        plane = first_plane + pair // num_pages
        word = (item % BLOCKS) * BLOCK + within
        offset = tl.multiple_of(tl.load(offsets + plane), ALIGNED)
        device_page = tl.load(device_pages + page).to(tl.int64)
        host_page = tl.load(host_pages + page).to(tl.int64)
        there = device + offset + device_page * device_stride + word
        host_plane = (plane - first_host_plane).to(tl.int64)
        here = host + host_page * host_stride + host_plane * chunk + word
        if IS_EVEN:
            if TO_DEVICE:
                tl.store(there, tl.load(here))
            else:
                tl.store(here, tl.load(there))
        else:
            inside = word < chunk
            if TO_DEVICE:
                tl.store(there, tl.load(here, mask=inside), mask=inside)
            else:
                tl.store(here, tl.load(there, mask=inside), mask=inside)


class PageKernel:
    """Between a device's pool and rows of memory in which pages lie as on the host."""

    def __init__(
        self,
        pool: DevicePool,
        *,
        to_device: bool,
        programs: int,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        layout = pool.layout
        self._to_device = to_device
        self._programs = programs
        self._planes = [plane for layer in range(layout.num_layers) for plane in pool.words(layer)]
        self._num_planes = layout.num_planes
        width = layout.word_bytes
        self._chunk = layout.chunk_bytes // width
        self._block = min(block_bytes // width, triton.next_power_of_2(self._chunk))
        first = self._planes[0].data_ptr()
        offsets = np.array([plane.data_ptr() - first for plane in self._planes]) // width
        self._offsets = torch.from_numpy(offsets).to(pool.device)
        # Words by which every plane is off at least: whether two may be moved as one.
        self._aligned = int(np.gcd.reduce(np.append(offsets, 16)))

    def launch(
        self,
        device_pages: torch.Tensor,
        rows: torch.Tensor,
        row_index: torch.Tensor,
        layers: range,
        first_layer: int = 0,
    ) -> None:
        """`rows` [rows, words], of which `row_index` are used; each has a page's layers, from
        `first_layer` on."""
        blocks = triton.cdiv(self._chunk, self._block)
        items = len(layers) * self._num_planes * len(row_index) * blocks
        if not items:
            return
        _move[(min(self._programs, items),)](
            self._planes[0],
            rows,
            self._offsets,
            device_pages,
            row_index,
            layers.start * self._num_planes,
            first_layer * self._num_planes,
            len(row_index),
            items,
            self._chunk,
            self._planes[0].stride(0),
            rows.stride(0),
            TO_DEVICE=self._to_device,
            BLOCK=self._block,
            BLOCKS=blocks,
            IS_EVEN=self._chunk % self._block == 0,
            ALIGNED=self._aligned,
            num_warps=_WARPS,
        )


class KernelMover:
    kind = MoverKind.KERNEL

    def __init__(
        self,
        ends: Ends,
        *,
        to_device: bool,
        programs: int = _PROGRAMS,
        block_bytes: int = _BLOCK_BYTES,
    ) -> None:
        layout = ends.device.layout
        self._kernel = PageKernel(
            ends.device, to_device=to_device, programs=programs, block_bytes=block_bytes
        )
        self._where = ends.device.device
        self._host = ends.host
        self._layer_bytes = layout.num_planes * layout.chunk_bytes

    def plan(self, device_pages: PageNumbers, host_pages: PageNumbers) -> Move:
        device_index, host_index = send_pages((device_pages, host_pages), self._where, np.int32)
        group = max(1, _LAUNCH_BYTES // max(1, len(host_pages) * self._layer_bytes))
        return Move(
            lambda layers: self._kernel.launch(device_index, self._host, host_index, layers), group
        )
