"""What moves pages on a stream: the protocol, and the one of torch's own kernels.

A mover serves one direction between one device pool and one host pool. It launches on the current
stream and waits for nothing. Knows tensors; no threads, no events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.memory.device import DevicePool, word_dtype
from quire.memory.host import plane_words
from quire.transfer.directed import copy_rows
from quire.transfer.kinds import MoverKind

PageNumbers = npt.NDArray[np.int32]
Launch = Callable[[range], None]
"""Moves these layers, all planes of them."""


@dataclass(frozen=True, slots=True)
class Move:
    """One copy, ready to be launched part by part."""

    launch: Launch
    group: int
    """So many layers are worth a launch of their own."""


_STAGING_BYTES = 32 << 20
_RISE = 8
"""The first and the last of the portions of a copy are so many times smaller than the others."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The two pools of a copy."""

    device: DevicePool
    host: torch.Tensor
    """[num_pages, stride words], as the device addresses it."""
    host_bytes: torch.Tensor
    """The same, [num_pages, stride], as the host does."""
    slice_pages: int | None = None
    """No copy may cross from one slice of so many host pages into the next; None: it may."""


class Mover(Protocol):
    kind: MoverKind

    def plan(self, device_pages: PageNumbers, host_pages: PageNumbers) -> Move:
        """The two are as long."""


class IndexMover:
    kind = MoverKind.INDEX

    def __init__(self, ends: Ends, *, to_device: bool) -> None:
        pool, layout = ends.device, ends.device.layout
        self._where = pool.device
        self._to_device = to_device
        self._planes = [
            (pool.words(layer), plane_words(layout, ends.host, layer))
            for layer in range(layout.num_layers)
        ]
        self._layout = layout
        self._rows = max(1, min(pool.num_pages, _STAGING_BYTES // layout.chunk_bytes))

    @cached_property
    def _staging(self) -> torch.Tensor:
        """Made on the stream that uses it."""
        words = self._layout.chunk_bytes // self._layout.word_bytes
        return torch.empty(self._rows, words, dtype=word_dtype(self._layout), device=self._where)

    def plan(self, device_pages: PageNumbers, host_pages: PageNumbers) -> Move:
        device_index, host_index = send_pages((device_pages, host_pages), self._where, np.int64)

        def launch(layers: range) -> None:
            for layer in layers:
                for device, host in zip(*self._planes[layer], strict=True):
                    if self._to_device:
                        copy_rows(host, host_index, device, device_index, self._staging)
                    else:
                        copy_rows(device, device_index, host, host_index, self._staging)

        return Move(launch, group=1)


def groups(layers: range, size: int | None) -> Iterator[range]:
    """All of these, so many at a time; None: at once."""
    size = len(layers) if size is None else size
    for first in range(0, len(layers), size):
        yield layers[first : first + size]


def portions(count: int, most: int) -> Iterator[slice]:
    """Of so many, at most so many at a time: rising to that at first, and falling at the end."""
    least = size = max(1, most // _RISE)
    first = 0
    while first < count:
        left = count - first
        some = min(size, left, max(least, -(-left // 2)))
        yield slice(first, first + some)
        first += some
        size = min(most, 2 * size)


def send_pages(
    pages: tuple[PageNumbers, ...], where: torch.device, dtype: type[np.int32] | type[np.int64]
) -> tuple[torch.Tensor, ...]:
    """To the device, all in one piece."""
    together = torch.from_numpy(np.stack(pages).astype(dtype))
    if where.type == "cuda":
        # Pinned, so that sending them does not wait for the stream to drain; torch keeps the
        # buffer until the transfer has happened.
        together = together.pin_memory().to(where, non_blocking=True)
    return together.unbind(0)
