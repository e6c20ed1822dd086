"""Copies between device and host pools: right to the bit, in layer order, and how fast.

For every shape, page size, inner layout and direction: bytes that are nowhere twice, random pages,
and an exact comparison of both pools, which also covers the pages that should not have changed. The
rate stands beside a plain contiguous copy of as many bytes (pinned, on CUDA), taken in turn with
it in the same run; medians of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

import torch

from quire.bench import Result
from quire.bench.link import BOTH, CopyWay, Link, PageOrder
from quire.memory.page_layout import InnerLayout, PageLayout, llama_3_1_8b, smollm2_135m
from quire.progress import Count
from quire.types import page_array

SHAPES: dict[str, Callable[[int, str], PageLayout]] = {
    "llama-3.1-8b": llama_3_1_8b,
    "smollm2-135m": smollm2_135m,
}

_DEFAULT_COPY_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}


def run(
    device: str = "cpu",
    shapes: Sequence[str] = tuple(SHAPES),
    page_sizes: Sequence[int] = (16, 64),
    *,
    pages: int | None = None,
    repeats: int = 5,
    progress: Count = lambda done, total: None,
) -> Result:
    """`pages` per copy; None: as many as make 32 MiB on a CPU, 1 GiB on CUDA (at least two)."""
    where = torch.device(device)
    layouts = [
        (shape, replace(_layout(shape, page_size, where), inner=inner))
        for shape in shapes
        for page_size in page_sizes
        for inner in InnerLayout
    ]
    cases: list[Result] = []
    for shape, layout in layouts:
        count = pages or max(2, _DEFAULT_COPY_BYTES[where.type] // layout.page_bytes)
        with closing(Link(layout, count * layout.page_bytes, where)) as link:
            for way in BOTH:
                ours, plain = link.shares((way,), PageOrder.SCATTERED, repeats)
                cases.append(
                    {
                        "shape": shape,
                        "dtype": layout.dtype,
                        "page_size": layout.page_size,
                        "inner": layout.inner.value,
                        "direction": way.value,
                        "num_pages": count,
                        "size_bytes": link.size_bytes,
                        "correct": _is_right(link, way),
                        "gb_per_s": round(ours / 1e9, 3),
                        "plain_gb_per_s": round(plain / 1e9, 3),
                        "ratio": round(ours / plain, 3),
                    }
                )
                progress(len(cases), 2 * len(layouts))
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "ok": all(case["correct"] for case in cases),
        "cases": cases,
    }


def _layout(shape: str, page_size: int, device: torch.device) -> PageLayout:
    dtype = "float32" if shape == "smollm2-135m" and device.type == "cpu" else "bfloat16"
    return SHAPES[shape](page_size, dtype)


def _is_right(link: Link, way: CopyWay) -> bool:
    """Are the pages copied, and nothing else, and each layer as soon as it was waited for?"""
    layers = [link.device.words(layer) for layer in range(link.device.layout.num_layers)]
    planes, host = [plane for layer in layers for plane in layer], link.host.raw()
    _number([host.view(torch.int64), *planes])
    on_device, on_host = _as_pages(planes), host.clone()
    copy, early = link.start(way, PageOrder.SCATTERED), []
    for number, layer in enumerate(layers):
        copy.wait_layer(number)
        # Taken by work launched right after the wait, and looked at only at the end.
        early += [plane.clone() for plane in layer]
    copy.wait()
    pages = link.pages[way, PageOrder.SCATTERED]
    there, here = (torch.tensor(page_array(each)).long() for each in pages)
    size = on_device.shape[1]
    if way is CopyWay.LOAD:
        on_device[there] = on_host[here, :size]
    else:
        on_host[here, :size] = on_device[there]
    in_time, arrived = (torch.equal(_as_pages(each), on_device) for each in (early, planes))
    return in_time and arrived and torch.equal(host, on_host)


def _number(tensors: Iterable[torch.Tensor]) -> None:
    """No two of their words are the same."""
    first = 0
    for words in tensors:
        numbers = torch.arange(first, first + words.numel(), device=words.device)
        words.copy_(numbers.view(words.shape))
        first += words.numel()


def _as_pages(planes: Iterable[torch.Tensor]) -> torch.Tensor:
    """On the host, as bytes: [pages, page_bytes]."""
    return torch.cat([plane.contiguous().view(torch.uint8).cpu() for plane in planes], dim=1)
