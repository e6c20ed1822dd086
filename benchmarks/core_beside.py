"""`quire bench core`'s chat and documents beside SGLang's RadixCache, in one run and one process.

RadixCache keeps the device alone: no host, no store, no page keys. What is timed of it is what a
request needs there: match, lock, allocate, evict, insert, unlock; pages come from a free list of
index tensors, as its allocators keep them. Rounds take turns; the fastest of each counts.

    pip download --no-deps sglang==0.5.23 && python -m zipfile -e sglang-*.whl FOLDER
    python benchmarks/core_beside.py FOLDER [ROUNDS]
"""

import gc
import json
import sys
import time
import types
from array import array
from pathlib import Path
from typing import Any

import torch

from quire.bench.core import PAGE_SIZE, CoreWorkload, chat, longdoc, measure


class Pages:
    """Free pages as one tensor of their numbers, given out as token indices."""

    device = "cpu"

    def __init__(self, num_tokens: int) -> None:
        self._free = torch.arange(num_tokens // PAGE_SIZE, dtype=torch.int64)
        self._freed: list[torch.Tensor] = []
        self._within = torch.arange(PAGE_SIZE, dtype=torch.int64)

    @property
    def num_tokens(self) -> int:
        return (len(self._free) + sum(map(len, self._freed))) * PAGE_SIZE

    def take(self, num_tokens: int) -> torch.Tensor:
        count = num_tokens // PAGE_SIZE
        if count > len(self._free):
            self._free, self._freed = torch.cat([self._free, *self._freed]), []
        taken, self._free = self._free[:count], self._free[count:]
        return (taken[:, None] * PAGE_SIZE + self._within).reshape(-1)

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        self._freed.append(indices[::PAGE_SIZE] // PAGE_SIZE)


def radix(workload: CoreWorkload) -> dict[str, float]:
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    pages = Pages(workload.device_tokens)
    tree: Any = RadixCache.create_simulated(mock_allocator=pages, page_size=PAGE_SIZE)
    spent = 0.0
    reused = asked = 0
    gc.collect()
    for tokens in workload.prompts():
        ids = array("q", tokens.tolist())  # as its requests keep them: not counted
        begun = time.process_time()
        key = RadixKey(ids).page_aligned(PAGE_SIZE)
        found = tree.match_prefix(base.MatchPrefixParams(key=key))
        node = found.last_device_node
        tree.inc_lock_ref(node)
        have = tree.path_device_indices(node)
        missing = len(key) - len(have)
        if (short := missing - pages.num_tokens) > 0:
            tree.evict(base.EvictParams(num_tokens=short))
        values = torch.cat([have, pages.take(missing)])
        tree.insert(base.InsertParams(key=key, value=values))
        tree.dec_lock_ref(node)
        spent += time.process_time() - begun
        reused += len(have)
        asked += len(key)
    return {
        "us_per_request": round(spent / workload.num_requests * 1e6, 1),
        "hit_rate": round(reused / max(1, asked), 3),
    }


def _only_its_trees(folder: Path) -> None:
    """Make SGLang's modules importable, without those of its engine, which need a GPU: the first
    files of its packages, its allocators and its utilities are not run."""
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in (
        "sglang.kernels",
        "sglang.kernels.ops",
        "sglang.kernels.ops.kvcache",
        "sglang.kernels.ops.kvcache.mla_buffer",
        "sglang.srt.mem_cache.allocator",
        "sglang.srt.mem_cache.memory_pool",
        "sglang.srt.observability",
        "sglang.srt.observability.metrics_collector",
        "sglang.srt.utils",
        "sglang.srt.utils.network",
        "sglang.srt.utils.common",
    ):
        left_out = types.ModuleType(name)
        vars(left_out).update(__path__=[], __getattr__=lambda _name: object)
        sys.modules[name] = left_out
    vars(sys.modules["sglang.srt.utils.common"])["ceil_align"] = lambda a, b: -(-a // b) * b


def main(folder: str, rounds: int) -> None:
    _only_its_trees(Path(folder) / "sglang")
    result: dict[str, Any] = {}
    for workload in (chat(), longdoc()):
        sides: dict[str, list[dict[str, float]]] = {"quire": [], "quire, no store": [], "radix": []}
        for _ in range(rounds):
            sides["quire"].append(measure(workload, store=True))
            sides["quire, no store"].append(measure(workload, store=False))
            sides["radix"].append(radix(workload))
        result[workload.name] = {
            name: {
                "us_per_request": min(sample["us_per_request"] for sample in samples),
                "rounds": [sample["us_per_request"] for sample in samples],
                "hit_rate": samples[0]["hit_rate"],
            }
            for name, samples in sides.items()
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3)
