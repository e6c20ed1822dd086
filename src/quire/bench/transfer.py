"""Copies between device and host pools: right to the bit, in layer order, and how fast.

For every shape, page size, inner layout and direction: random content, random pages, a poisoned
destination, and an exact comparison that also covers the pages that should not have changed. The
rate stands beside a plain contiguous copy of as many bytes (pinned, on CUDA), taken in turn with
it in the same run; medians of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from quire.bench.link import BOTH, CopyWay, Link, PageOrder
from quire.memory.page_layout import InnerLayout, PageLayout, llama_3_1_8b, smollm2_135m
from quire.progress import Count
from quire.types import page_array

SHAPES: dict[str, Callable[[int, str], PageLayout]] = {
    "llama-3.1-8b": llama_3_1_8b,
    "smollm2-135m": smollm2_135m,
}
Result = dict[str, Any]

_POISON = 0xA5
ORDER = PageOrder.SCATTERED
_DEFAULT_COPY_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}


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
    results: list[Result] = []
    for shape, layout in layouts:
        count = pages or max(2, _DEFAULT_COPY_BYTES[where.type] // layout.page_bytes)
        bench = _Bench(layout, count, where)
        with closing(bench.link):
            for way in BOTH:
                results.append(bench.case(shape, way, repeats))
                if progress is not None:
                    progress(len(results), 2 * len(layouts))
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ok": all(result["correct"] and result["layers_in_order"] for result in results),
        "cases": results,
    }


def _layout(shape: str, page_size: int, device: torch.device) -> PageLayout:
    dtype = "float32" if shape == "smollm2-135m" and device.type == "cpu" else "bfloat16"
    return SHAPES[shape](page_size, dtype)


class _Bench:
    """Half of each pool must stay untouched by a copy."""

    def __init__(self, layout: PageLayout, count: int, device: torch.device) -> None:
        self.layout, self.count = layout, count
        self.link = Link(layout, count * layout.page_bytes, device)
        generator = torch.Generator().manual_seed(layout.page_size)
        self.expected = torch.randint(
            0, 256, (count, layout.page_bytes), dtype=torch.uint8, generator=generator
        )

    def case(self, shape: str, way: CopyWay, repeats: int) -> Result:
        correct, in_order = self.check_load() if way is CopyWay.LOAD else self.check_backup()
        rate, plain = self.link.shares((way,), ORDER, repeats)
        return {
            "shape": shape,
            "dtype": self.layout.dtype,
            "page_size": self.layout.page_size,
            "inner": self.layout.inner.value,
            "direction": way.value,
            "num_pages": self.count,
            "size_bytes": self.count * self.layout.page_bytes,
            "correct": correct,
            "layers_in_order": in_order,
            "gb_per_s": round(rate / 1e9, 3),
            "plain_gb_per_s": round(plain / 1e9, 3),
            "ratio": round(rate / plain, 3),
        }

    def check_load(self) -> tuple[bool, bool]:
        """(content right, each layer right as soon as it was waited for)."""
        link, (device, host) = self.link, self._pages(CopyWay.LOAD)
        self._poison()
        link.host.raw()[host, : self.layout.page_bytes] = self.expected
        copy = link.start(CopyWay.LOAD, ORDER)
        # Taken by work launched right after the wait, and looked at only at the end.
        to, early = device.to(link.device.device), []
        for layer in range(self.layout.num_layers):
            copy.wait_layer(layer)
            early += [plane.index_select(0, to) for plane in link.device.words(layer)]
        copy.wait()
        in_order = torch.equal(_as_pages(early), self.expected)
        in_order &= copy.layer_done(self.layout.num_layers - 1)
        return self._is_right(_as_pages(self._planes()), device), in_order

    def check_backup(self) -> tuple[bool, bool]:
        link, (device, host) = self.link, self._pages(CopyWay.BACKUP)
        self._poison()
        chunks = self.expected.view(self.count, -1, self.layout.chunk_bytes).unbind(1)
        for plane, chunk in zip(self._planes(), chunks, strict=True):
            plane[device.to(plane.device)] = chunk.contiguous().view(plane.dtype).to(plane.device)
        copy = link.start(CopyWay.BACKUP, ORDER)
        in_order = True
        for layer in range(self.layout.num_layers):
            copy.wait_layer(layer)
            link.wait()
            in_order &= all(copy.layer_done(earlier) for earlier in range(layer + 1))
        copy.wait()
        return self._is_right(link.host.raw()[:, : self.layout.page_bytes], host), in_order

    def _pages(self, way: CopyWay) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, on the host."""
        device, host = self.link.pages[way, ORDER]
        return torch.tensor(page_array(device)).long(), torch.tensor(page_array(host)).long()

    def _planes(self) -> list[torch.Tensor]:
        """Of the device, in the order in which a page of the host has its chunks."""
        layers = range(self.layout.num_layers)
        return [plane for layer in layers for plane in self.link.device.words(layer)]

    def _is_right(self, pool: torch.Tensor, pages: torch.Tensor) -> bool:
        """`pool`: all of it, as bytes of pages. What was not copied is as it was."""
        others = torch.ones(2 * self.count, dtype=torch.bool)
        others[pages] = False
        return torch.equal(pool[pages], self.expected) and bool((pool[others] == _POISON).all())

    def _poison(self) -> None:
        self.link.host.raw().fill_(_POISON)
        for plane in self._planes():
            plane.view(torch.uint8).fill_(_POISON)
        self.link.wait()


def _as_pages(planes: Iterable[torch.Tensor]) -> torch.Tensor:
    """On the host, as bytes: [pages, page_bytes]."""
    return torch.cat([plane.contiguous().view(torch.uint8).cpu() for plane in planes], dim=1)
