"""Copies between device and host pools: right to the bit, in layer order, and how fast.

For every shape, page size, inner layout and direction: random content, random pages, a poisoned
destination, and an exact comparison that also covers the pages that should not have changed. The
rate stands beside a plain contiguous copy of as many bytes (pinned, on CUDA), taken in turn with
it in the same run; medians of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.memory.page_layout import InnerLayout, PageLayout, llama_3_1_8b, smollm2_135m
from quire.progress import Count
from quire.transfer import open_copy_engine
from quire.transfer.base import Copy, CopyEngine
from quire.types import PageIds, page_ids

SHAPES: dict[str, Callable[[int, str], PageLayout]] = {
    "llama-3.1-8b": llama_3_1_8b,
    "smollm2-135m": smollm2_135m,
}
_POISON = 0xA5
_DEFAULT_COPY_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}


@dataclass(frozen=True, slots=True)
class CaseResult:
    shape: str
    dtype: str
    page_size: int
    inner: str
    direction: str
    num_pages: int
    size_bytes: int
    correct: bool
    layers_in_order: bool
    gb_per_s: float
    plain_gb_per_s: float
    ratio: float


def run(
    device: str = "cpu",
    shapes: Sequence[str] = tuple(SHAPES),
    page_sizes: Sequence[int] = (16, 64),
    *,
    pages: int | None = None,
    repeats: int = 5,
    progress: Count | None = None,
) -> dict[str, Any]:
    """`pages` per copy; None: as many as make 32 MiB on a CPU, 1 GiB on CUDA (at least two)."""
    where = torch.device(device)
    layouts = [
        (shape, replace(_layout(shape, page_size, where), inner=inner))
        for shape in shapes
        for page_size in page_sizes
        for inner in InnerLayout
    ]
    results: list[CaseResult] = []
    for shape, layout in layouts:
        count = pages or max(2, _DEFAULT_COPY_BYTES[where.type] // layout.page_bytes)
        with _Bench(layout, count, where) as bench:
            for direction in ("load", "backup"):
                results.append(bench.case(shape, direction, repeats))
                if progress is not None:
                    progress(len(results), 2 * len(layouts))
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ok": all(result.correct and result.layers_in_order for result in results),
        "cases": [asdict(result) for result in results],
    }


def _layout(shape: str, page_size: int, device: torch.device) -> PageLayout:
    dtype = "float32" if shape == "smollm2-135m" and device.type == "cpu" else "bfloat16"
    return SHAPES[shape](page_size, dtype)


class _Bench:
    """Pools twice as large as a copy, so that half of every destination must stay untouched."""

    def __init__(self, layout: PageLayout, count: int, device: torch.device) -> None:
        self.layout = layout
        self.count = count
        self.device = DevicePool.allocate(layout, 2 * count, device)
        pin_for = self.device.device if device.type == "cuda" else None
        self.host = HostPool(layout, 2 * count, pin_for=pin_for)
        self.engine: CopyEngine = open_copy_engine(self.device, self.host)
        generator = torch.Generator().manual_seed(layout.page_size)
        permutations = [torch.randperm(2 * count, generator=generator) for _ in range(2)]
        self.host_pages, self.device_pages = (order[:count] for order in permutations)
        self.expected = torch.randint(
            0, 256, (count, layout.page_bytes), dtype=torch.uint8, generator=generator
        )
        self._flat = torch.empty(count * layout.page_stride_bytes, dtype=torch.uint8, device=device)

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.host.close()

    def case(self, shape: str, direction: str, repeats: int) -> CaseResult:
        correct, in_order = self.check_load() if direction == "load" else self.check_backup()
        rates: list[float] = []
        plain_rates: list[float] = []
        for _ in range(repeats):
            plain_rates.append(self._rate(lambda: self._plain(direction)))
            rates.append(self._rate(lambda: self._start(direction).wait()))
        rate, plain = statistics.median(rates), statistics.median(plain_rates)
        return CaseResult(
            shape=shape,
            dtype=self.layout.dtype,
            page_size=self.layout.page_size,
            inner=self.layout.inner.value,
            direction=direction,
            num_pages=self.count,
            size_bytes=self.count * self.layout.page_bytes,
            correct=correct,
            layers_in_order=in_order,
            gb_per_s=round(rate, 3),
            plain_gb_per_s=round(plain, 3),
            ratio=round(rate / plain, 3),
        )

    def check_load(self) -> tuple[bool, bool]:
        """(content right, each layer right as soon as it was waited for)."""
        self._poison()
        self.host.raw()[self.host_pages, : self.layout.page_bytes] = self.expected
        copy = self._start("load")
        to = self.device_pages.to(self.device.device)
        # Taken by work launched right after the wait, and looked at only at the end.
        early = [
            self._after_wait(copy, layer, lambda plane: plane.index_select(0, to))
            for layer in range(self.layout.num_layers)
        ]
        copy.wait()
        correct = self._device_right()
        in_order = all(self._chunks_equal(layer, planes) for layer, planes in enumerate(early))
        return correct, in_order and copy.layer_done(self.layout.num_layers - 1)

    def check_backup(self) -> tuple[bool, bool]:
        self._poison()
        for layer in range(self.layout.num_layers):
            for plane, words in enumerate(self.device.words(layer)):
                rows = self._expected_chunk(layer, plane).to(words.device)
                words[self.device_pages.to(words.device)] = rows
        copy = self._start("backup")
        in_order = True
        for layer in range(self.layout.num_layers):
            copy.wait_layer(layer)
            self._synchronize()
            in_order &= all(copy.layer_done(earlier) for earlier in range(layer + 1))
        copy.wait()
        return self._host_right(), in_order

    def _after_wait(
        self, copy: Copy, layer: int, use: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        copy.wait_layer(layer)
        return [use(plane) for plane in self.device.words(layer)]

    def _device_right(self) -> bool:
        untouched = torch.ones(2 * self.count, dtype=torch.bool)
        untouched[self.device_pages] = False
        right = True
        for layer in range(self.layout.num_layers):
            planes = [plane.cpu() for plane in self.device.words(layer)]
            right &= self._chunks_equal(layer, [plane[self.device_pages] for plane in planes])
            right &= all(_is_poison(plane[untouched]) for plane in planes)
        return right

    def _host_right(self) -> bool:
        pages = self.host.raw()[:, : self.layout.page_bytes]
        untouched = torch.ones(2 * self.count, dtype=torch.bool)
        untouched[self.host_pages] = False
        same = torch.equal(pages[self.host_pages], self.expected)
        return same and _is_poison(pages[untouched])

    def _chunks_equal(self, layer: int, planes: Sequence[torch.Tensor]) -> bool:
        return all(
            torch.equal(rows.cpu(), self._expected_chunk(layer, plane))
            for plane, rows in enumerate(planes)
        )

    def _expected_chunk(self, layer: int, plane: int) -> torch.Tensor:
        """[count, chunk words]"""
        size = self.layout.chunk_bytes
        first = (layer * self.layout.num_planes + plane) * size
        chunk = self.expected[:, first : first + size].contiguous()
        return chunk.view(self.device.words(0)[0].dtype)

    def _poison(self) -> None:
        self.host.raw().fill_(_POISON)
        for layer in range(self.layout.num_layers):
            for plane in self.device.words(layer):
                plane.view(torch.uint8).fill_(_POISON)
        self._synchronize()

    def _start(self, direction: str) -> Copy:
        host, device = _ids(self.host_pages), _ids(self.device_pages)
        if direction == "load":
            return self.engine.load(host, device)
        return self.engine.backup(device, host)

    def _plain(self, direction: str) -> None:
        contiguous = self.host.raw()[: self.count].view(-1)
        if direction == "load":
            self._flat.copy_(contiguous, non_blocking=True)
        else:
            contiguous.copy_(self._flat, non_blocking=True)

    def _rate(self, work: Callable[[], None]) -> float:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        seconds = time.perf_counter() - started
        return self.count * self.layout.page_bytes / 1e9 / seconds

    def _synchronize(self) -> None:
        if self.device.device.type == "cuda":
            torch.cuda.synchronize(self.device.device)


def _ids(pages: torch.Tensor) -> PageIds:
    return page_ids(pages.numpy())


def _is_poison(words: torch.Tensor) -> bool:
    return bool((words.contiguous().view(torch.uint8) == _POISON).all())
