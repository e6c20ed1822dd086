"""How many bytes the tree and the allocators keep for each token that is cached somewhere.

Token ids included, after the workloads of `quire bench core`, with a store and without.

    python benchmarks/core_bytes.py
"""

import json
import sys

from quire.bench.core import CoreWorkload, StepTimer, chat, longdoc, measure
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.manager.inspection import inspect


def after(workload: CoreWorkload, *, store: bool) -> float:
    used: list[CacheManager] = []

    def remember(timer: StepTimer, _: Namespace) -> None:
        used.append(timer.manager)

    measure(workload, store=store, before=remember)
    return round(metadata_bytes_per_token(*used), 2)


def metadata_bytes_per_token(manager: CacheManager) -> float:
    inside = inspect(manager)
    total = sum(allocator.num_pages * 4 for allocator in inside.allocators)
    tokens = 0
    for node in inside.nodes():
        tokens += node.num_pages * manager.config.page_size
        total += sys.getsizeof(node) + sys.getsizeof(node.tokens) + sys.getsizeof(node.held)
        total += sys.getsizeof(node.page_keys) if node.page_keys else 0
        total += sys.getsizeof(node.end)
        for holding in node.held:
            if holding is not None:
                total += sys.getsizeof(holding) + sys.getsizeof(holding.pages)
        if node.children is not None:
            total += sys.getsizeof(node.children)
            total += sum(map(sys.getsizeof, node.children))
    return total / max(1, tokens)


def main() -> None:
    result = {}
    for workload in (chat(), longdoc(), chat(active=2000)):
        result[workload.name] = {
            "bytes_per_token": after(workload, store=True),
            "bytes_per_token_no_store": after(workload, store=False),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
