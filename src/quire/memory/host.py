"""HostPool: L2 pages, page-first, each one contiguous block-aligned object that L3 takes as it is.

Knows one mapping: aligned, in huge pages and near the device where the system has such,
pre-faulted, and registered with CUDA when asked, so that copies to and from the device are truly
asynchronous; its own, or one that others on this machine may read. Does not know which pages are
in use.

The mapping lives as long as anything refers to it: a store or a test that still holds a page's
view after close() reads valid, if meaningless, memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch

from quire.errors import MemoryBudgetError
from quire.memory.device import torch_dtype, word_dtype
from quire.memory.numa import node_of_device, prefer_node
from quire.memory.page_layout import BLOCK_BYTES, PageLayout
from quire.memory.shared import NotShareable, create_shared
from quire.memory.sizing import check_host_budget
from quire.progress import Count

_PREFAULT_SLICE_BYTES = 64 << 20
_PIN_SLICE_BYTES = 4 << 30
"""Pinning takes a quarter of a second per GiB: in parts, so that it can be watched."""
_MAX_PREFAULT_THREADS = 8
_CUDA_HOST_REGISTER_PORTABLE_MAPPED = 1 | 2


class HostPool:
    """`num_pages` pages of `layout.page_stride_bytes` each."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        *,
        pin_for: torch.device | None = None,
        is_shared: bool = False,
        progress: Count | None = None,
    ) -> None:
        """Takes all its memory now, and pins it when a CUDA device is named. `is_shared`: others
        may read it, if the system lets them. `progress`: told of bytes, from this thread; of a
        pool that is pinned twice, when they are touched and when they are pinned.

        Raises MemoryBudgetError when it does not fit, or cannot be pinned.
        """
        self.layout = layout
        self.num_pages = num_pages
        self.size_bytes = num_pages * layout.page_stride_bytes
        check_host_budget(self.size_bytes, what=f"host pool '{layout.component}'")
        mapping, self._descriptor = _map(max(self.size_bytes, BLOCK_BYTES), is_shared)
        self._close_descriptor: Callable[[], object] = lambda: None
        if self._descriptor is not None:
            self._close_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self._buffer = memoryview(mapping)
        # [num_pages, stride]; every other tensor is a view of this one.
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)[: self.size_bytes].view(
            num_pages, layout.page_stride_bytes
        )
        self._slices: list[int] = []
        """Addresses at which parts of it are registered with CUDA."""
        passes = 1 if pin_for is None else 2
        tell = progress or (lambda done, total: None)
        if pin_for is not None and self.size_bytes:
            _move_near(self._bytes, pin_for)
        _prefault(self._buffer[: self.size_bytes], lambda done, total: tell(done, passes * total))
        if pin_for is not None:
            self._pin(pin_for, lambda done, total: tell(total + done, passes * total))

    @property
    def slice_pages(self) -> int:
        """Pages that are pinned together: no copy may cross from one slice into the next."""
        return max(1, _PIN_SLICE_BYTES // self.layout.page_stride_bytes)

    @property
    def pinned(self) -> bool:
        return bool(self._slices)

    @property
    def descriptor(self) -> int | None:
        """By which other processes may map it, to read, while it is not closed; None: they
        cannot."""
        return self._descriptor

    @property
    def data_ptr(self) -> int:
        return self._bytes.data_ptr()

    def page_view(self, page: int) -> memoryview:
        """The page's bytes, padding included, writable, without a copy."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of a host pool with {self.num_pages} pages")
        stride = self.layout.page_stride_bytes
        return self._buffer[page * stride : (page + 1) * stride]

    def raw(self) -> torch.Tensor:
        """The whole pool as bytes, [num_pages, stride]."""
        return self._bytes

    def pages(self) -> torch.Tensor:
        """[num_pages, num_layers, num_planes, *inner], strided over the padding."""
        layout = self.layout
        shape = (self.num_pages, layout.num_layers, layout.num_planes, *layout.inner_shape)
        return self._bytes[:, : layout.page_bytes].view(torch_dtype(layout)).view(shape)

    def words(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Every plane of a layer as integers, each [num_pages, chunk words]; mirrors the same
        method of DevicePool."""
        return plane_words(self.layout, self._bytes.view(word_dtype(self.layout)), layer)

    def close(self) -> None:
        """Unregister from CUDA. The caller makes sure that no copy is under way."""
        slices, self._slices = self._slices, []
        for address in slices:
            torch.cuda.check_error(_cudart().cudaHostUnregister(address))
        self._descriptor = None
        self._close_descriptor()

    def _pin(self, device: torch.device, progress: Count) -> None:
        """Page by page whole: a copy that crossed two registrations would be refused."""
        step = self.slice_pages
        for first in range(0, self.num_pages, step):
            part = self._bytes[first : first + step]
            try:
                _register(part, device)
            except MemoryBudgetError:
                self.close()
                raise
            self._slices.append(part.data_ptr())
            progress(min(first + step, self.num_pages) * part.stride(0), self.size_bytes)


def plane_words(layout: PageLayout, pages: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    """[num_pages, stride words] → the planes of one layer, each [num_pages, chunk words]."""
    chunk = layout.chunk_bytes // layout.word_bytes
    first = layer * layout.num_planes
    return tuple(
        pages[:, plane * chunk : (plane + 1) * chunk]
        for plane in range(first, first + layout.num_planes)
    )


def _map(size_bytes: int, is_shared: bool) -> tuple[mmap.mmap, int | None]:
    """And its descriptor, if it is shared."""
    descriptor = None
    try:
        if is_shared:
            with contextlib.suppress(NotShareable):
                descriptor, mapping = create_shared(size_bytes)
        if descriptor is None:
            mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryBudgetError(
            f"host pool of {size_bytes} bytes could not be mapped ({error}): lower its size"
        ) from error
    # Fewer faults now and fewer TLB misses later; an optimisation, so a refusal is no matter.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, descriptor


def _move_near(memory: torch.Tensor, device: torch.device) -> None:
    """Before it is touched."""
    found: Any = torch.cuda.get_device_properties(device)
    with contextlib.suppress(AttributeError):  # torch says where a device is since 2.8
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = node_of_device(address)
        if node is not None:
            prefer_node(memory.data_ptr(), memory.numel(), node)


def _prefault(buffer: memoryview, progress: Count) -> None:
    """Touch every block from several threads: the first touch of a page is what costs, and numpy
    lets go of the GIL while it writes."""
    total = len(buffer)
    if total == 0:
        return
    blocks = np.frombuffer(buffer, dtype=np.uint8)

    def touch(start: int) -> int:
        piece = blocks[start : start + _PREFAULT_SLICE_BYTES]
        piece[::BLOCK_BYTES] = 0
        return len(piece)

    done = 0
    threads = min(_MAX_PREFAULT_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="quire-prefault") as pool:
        starts = range(0, total, _PREFAULT_SLICE_BYTES)
        for future in as_completed([pool.submit(touch, start) for start in starts]):
            done += future.result()
            progress(done, total)


def _register(memory: torch.Tensor, device: torch.device) -> None:
    size_bytes = memory.numel()
    with torch.cuda.device(device):  # the registration belongs to the current device's context
        code = _cudart().cudaHostRegister(
            memory.data_ptr(), size_bytes, _CUDA_HOST_REGISTER_PORTABLE_MAPPED
        )
    if int(code) != 0:
        raise MemoryBudgetError(
            f"{size_bytes / (1 << 30):.2f} GiB of host memory could not be pinned for CUDA "
            f"(error {int(code)}): lower the size of the host pool"
        )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
