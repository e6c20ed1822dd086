"""On a CUDA device: what loads and saves of vLLM's blocks reach of a plain pinned copy.

python tests/vllm_layout_rates.py     a table; for people, not a test
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from quire.integrations.vllm.hands import Hands
from quire.integrations.vllm.tensors import BlockShape, describe
from quire.transfer import CopyEngine
from quire.types import PageIds, page_ids
from vllm_layout_cases import LAYOUTS, tensors_of

LAYERS, REPEATS = 32, 7
SHAPE = BlockShape(num_blocks=2048, tokens=16, heads=8, dim=128)
"""Of Llama-3.1-8B: 2 MiB per block, in bf16."""
HOST_PAGES, MOVED = 1024, 512


def main() -> None:
    up, down = plain()
    for layout in LAYOUTS:
        tensors = tensors_of(layout, SHAPE, LAYERS, torch.bfloat16, "cuda")
        hands = Hands(0, 1, [describe([tensors], SHAPE)], [HOST_PAGES])
        rng = random.Random(1)
        there = page_ids(rng.sample(range(1, SHAPE.num_blocks), MOVED))
        here = page_ids(rng.sample(range(HOST_PAGES), MOVED))
        load, save = both(hands.pools["full"].engine, here, there)
        print(f"{layout:15} load {up / load:.3f}, save {down / save:.3f} of the plain copy")
        hands.close()
        del tensors


def plain() -> tuple[float, float]:
    """Seconds in which as many bytes come to the device, and from it, in one piece."""
    num_bytes = MOVED * LAYERS * 2 * SHAPE.tokens * SHAPE.heads * SHAPE.dim * 2
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    up = median(lambda: device.copy_(pinned, non_blocking=True))
    down = median(lambda: pinned.copy_(device, non_blocking=True))
    print(f"plain: load {num_bytes / up / 1e9:.1f} GB/s, save {num_bytes / down / 1e9:.1f} GB/s")
    return up, down


def both(engine: CopyEngine, here: PageIds, there: PageIds) -> tuple[float, float]:
    load = median(lambda: engine.load(here, there).wait())
    return load, median(lambda: engine.backup(there, here).wait())


def median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
