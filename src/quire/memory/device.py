"""DevicePool: L1 pages, layer-first, where attention kernels read and write them.

Knows the tensors of one component on one device. Does not know which pages are in use (the
leader's allocators do) nor how bytes get here (transfer/ does).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.errors import ConfigError, MemoryBudgetError
from quire.memory.page_layout import PageLayout

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def torch_dtype(layout: PageLayout) -> torch.dtype:
    dtype = getattr(torch, layout.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def word_dtype(layout: PageLayout) -> torch.dtype:
    """Integer type in which copies see a chunk: moving words is several times faster than bytes,
    and integers are moved bit by bit (no NaN is quietened on the way)."""
    return _WORDS[layout.word_bytes]


class DevicePool:
    """Per layer and plane one tensor [num_pages, *inner]; any engine's own tensors will do."""

    def __init__(
        self,
        layout: PageLayout,
        planes: Sequence[Sequence[torch.Tensor]],
        parts: Sequence[range] | None = None,
    ) -> None:
        """`planes[layer][plane]`; each page of each must be contiguous. `parts`: layers whose page
        has a number of its own, where an engine numbers them so: all layers, in order. A page is
        then named by as many numbers, one after the other."""
        self.layout = layout
        self.parts = tuple(parts or [range(layout.num_layers)])
        self._planes = tuple(tuple(tensors) for tensors in planes)
        first = self._planes[0][0]
        self.num_pages = first.shape[0]
        self.device = first.device
        self._check()
        words = word_dtype(layout)
        # [num_pages, chunk words] views of the same memory, for the copy engines.
        self._words = tuple(
            tuple(tensor.flatten(1).view(words) for tensor in tensors) for tensors in self._planes
        )

    @classmethod
    def allocate(
        cls, layout: PageLayout, num_pages: int, device: str | torch.device = "cpu"
    ) -> DevicePool:
        """One zeroed allocation for all layers. Raises MemoryBudgetError when it does not fit."""
        shape = (layout.num_layers, layout.num_planes, num_pages, *layout.inner_shape)
        try:
            pool = torch.zeros(shape, dtype=torch_dtype(layout), device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            gib = num_pages * layout.page_bytes / (1 << 30)
            raise MemoryBudgetError(
                f"device pool '{layout.component}' of {num_pages} pages ({gib:.1f} GiB) does not "
                f"fit on {device}: lower its number of pages"
            ) from error
        return cls(layout, [list(layer.unbind(0)) for layer in pool.unbind(0)])

    def k(self, layer: int) -> torch.Tensor:
        """[num_pages, *inner]"""
        return self._planes[layer][0]

    def v(self, layer: int) -> torch.Tensor:
        """[num_pages, *inner]"""
        return self._planes[layer][1]

    def planes(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Every plane of a layer, each [num_pages, *inner]."""
        return self._planes[layer]

    def words(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Every plane of a layer as integers, each [num_pages, chunk words]."""
        return self._words[layer]

    def _check(self) -> None:
        layout = self.layout
        in_parts = [layer for part in self.parts for layer in part]
        if in_parts != list(range(layout.num_layers)):
            raise ConfigError(f"parts have layers {in_parts}: all are needed, in order")
        expected = (self.num_pages, *layout.inner_shape)
        if len(self._planes) != layout.num_layers:
            raise ConfigError(
                f"device pool has {len(self._planes)} layers, its layout says {layout.num_layers}"
            )
        for layer, tensors in enumerate(self._planes):
            if len(tensors) != layout.num_planes:
                raise ConfigError(
                    f"layer {layer} has {len(tensors)} planes, its layout says {layout.num_planes}"
                )
            for tensor in tensors:
                if tuple(tensor.shape) != expected or tensor.dtype != torch_dtype(layout):
                    raise ConfigError(
                        f"layer {layer} is {tuple(tensor.shape)} {tensor.dtype}, its layout says "
                        f"{expected} {torch_dtype(layout)}"
                    )
                if tensor.device != self.device:
                    raise ConfigError(f"layer {layer} is on {tensor.device}, not {self.device}")
                if self.num_pages and not tensor[0].is_contiguous():
                    raise ConfigError(f"layer {layer}: a page must be contiguous in memory")
