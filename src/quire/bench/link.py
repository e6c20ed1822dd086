"""Link: copies between two pools of real layout, beside plain copies of as many bytes.

Each pool has two halves: loads use the first of both, backups the second, so that both ways may go
on at once.
"""

from __future__ import annotations

import contextlib
import enum
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import PageLayout
from quire.transfer import Copy, open_copy_engine
from quire.types import PageIds, page_ids

_REPEATS = 5


class CopyWay(enum.Enum):
    LOAD = "load"
    BACKUP = "backup"


class PageOrder(enum.Enum):
    ORDERED = "ordered"
    SCATTERED = "scattered"


BOTH = (CopyWay.LOAD, CopyWay.BACKUP)


class Link:
    def __init__(self, layout: PageLayout, size_bytes: int, device: torch.device) -> None:
        """`size_bytes`: of each copy, in whole pages."""
        self._count = count = max(2, size_bytes // layout.page_bytes)
        self.size_bytes = count * layout.page_bytes
        self.device = DevicePool.allocate(layout, 2 * count, device)
        self.host = HostPool(
            layout, 2 * count, pin_for=self.device.device if device.type == "cuda" else None
        )
        page = torch.randint(0, 256, (layout.page_stride_bytes,), dtype=torch.uint8)
        self.host.raw().copy_(page.expand_as(self.host.raw()))
        self._engine = open_copy_engine(self.device, self.host)
        self._flat = [torch.empty(self.size_bytes, dtype=torch.uint8, device=device) for _ in BOTH]
        self._streams = _streams(device)
        chance = np.random.default_rng(0)
        self.pages = {
            (way, order): tuple(self._some(order, half, chance) for _ in range(2))
            for half, way in enumerate(BOTH)
            for order in PageOrder
        }

    @property
    def how(self) -> str:
        """What moves the pages, and why that."""
        return self._engine.how

    def close(self) -> None:
        self._engine.close()
        self.host.close()

    def shares(
        self, ways: Sequence[CopyWay], order: PageOrder, repeats: int = _REPEATS
    ) -> tuple[float, float]:
        """Bytes a second of ours and of plain copies, all `ways` at once; taken in turn."""
        ours, plain = [], []
        for _ in range(repeats + 1):
            plain.append(self._rate(ways, lambda: self._plain(ways)))
            ours.append(self._rate(ways, lambda: self._ours(ways, order)))
        return statistics.median(ours[1:]), statistics.median(plain[1:])  # warm

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)

    def _some(self, order: PageOrder, half: int, chance: np.random.Generator) -> PageIds:
        pages = np.arange(self._count)
        if order is PageOrder.SCATTERED:
            pages = chance.permutation(self._count)
        return page_ids((pages + half * self._count).astype(np.int32))

    def start(self, way: CopyWay, order: PageOrder) -> Copy:
        device, host = self.pages[way, order]
        if way is CopyWay.LOAD:
            return self._engine.load(host, device)
        return self._engine.backup(device, host)

    def _ours(self, ways: Sequence[CopyWay], order: PageOrder) -> None:
        for copy in [self.start(way, order) for way in ways]:
            copy.wait()

    def _plain(self, ways: Sequence[CopyWay]) -> None:
        raw = self.host.raw().view(-1)
        for way, stream in zip(ways, self._streams, strict=False):
            with stream:
                if way is CopyWay.LOAD:
                    self._flat[0].copy_(raw[: self.size_bytes], non_blocking=True)
                else:
                    half = self._count * self.host.layout.page_stride_bytes
                    raw[half : half + self.size_bytes].copy_(self._flat[1], non_blocking=True)

    def _rate(self, ways: Sequence[CopyWay], work: Callable[[], None]) -> float:
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return len(ways) * self.size_bytes / (time.perf_counter() - began)


def _streams(device: torch.device) -> list[contextlib.AbstractContextManager[object]]:
    if device.type != "cuda":
        return [contextlib.nullcontext() for _ in BOTH]
    made = [torch.cuda.Stream(device) for _ in BOTH]  # type: ignore[no-untyped-call]
    return [torch.cuda.stream(stream) for stream in made]
