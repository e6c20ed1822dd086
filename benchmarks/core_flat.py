"""Does what a request costs the step thread depend on how much there is beside it? It should not.

Requests of `quire bench core` while there are 2,000 leaves (of nothing in common, or of one fork),
200 open leases or 200 loads under way, and while there are ten times as many, in turn.

    python benchmarks/core_flat.py [ROUNDS]
"""

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.bench.core import PAGE_SIZE, CoreWorkload, StepTimer, measure, random_tokens, serve
from quire.keys import Namespace, PrefixKey
from quire.types import RequestId, Tier

FLAT = {
    "leaves": (2_000, 20_000),
    "leaves of a fork": (2_000, 20_000),
    "leases": (200, 2_000),
    "loads": (200, 2_000),
}
CROWD_PAGES = 2
"""Of each request that is there and does nothing."""


def leaves(count: int, *, fork: bool = False) -> CoreWorkload:
    """Prompts of 4 pages, five times as many as the device holds: all leaves."""

    def prompts() -> Iterator[npt.NDArray[np.int32]]:
        rng = np.random.default_rng(13)
        common = random_tokens(rng, 4 * PAGE_SIZE if fork else 0)
        for _ in range(count * 5):
            yield np.concatenate([common, random_tokens(rng, 4 * PAGE_SIZE)])

    return CoreWorkload("leaves", prompts, count * 5, (count + 1) * 4 * PAGE_SIZE, host_factor=2)


def crowded(count: int, beside: CoreWorkload, *, loading: bool) -> float:
    """Microseconds per request beside so many others, whose pages, if they are loading, are on
    their way from the host and do not come."""

    def gather(timer: StepTimer, namespace: Namespace) -> None:
        manager = timer.manager
        keys = [
            PrefixKey(
                namespace,
                random_tokens(np.random.default_rng([17, number]), CROWD_PAGES * PAGE_SIZE),
            )
            for number in range(count)
        ]
        for key in keys:
            serve(timer, namespace, key.tokens, None)
        if loading:
            manager.flush(Tier.DEVICE)
        for number, key in enumerate(keys):
            lease = manager.acquire(manager.match(key), RequestId(f"crowd-{number}"))
            manager.load(lease)
            manager.step()

    room = beside.device_tokens + count * CROWD_PAGES * PAGE_SIZE
    found = measure(replace(beside, device_tokens=room), store=False, before=gather)
    return found["us_per_request"]


def cost(what: str, number: int) -> float:
    if "leaves" in what:
        return measure(leaves(number, fork="fork" in what), store=False)["us_per_request"]
    return crowded(number, leaves(FLAT[what][1]), loading=what == "loads")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    result = {}
    for what, (few, many) in FLAT.items():
        found = [(cost(what, few), cost(what, many)) for _ in range(rounds)]
        result[what] = {
            "numbers": [few, many],
            "us_per_request": [
                round(statistics.median(side), 1) for side in zip(*found, strict=True)
            ],
            "ratio": round(statistics.median(b / a for a, b in found), 3),
        }
        print(what, result[what], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
