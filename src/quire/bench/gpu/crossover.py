"""Crossover: where fetching a prompt begins to be slower than computing it, and both at once.

One prompt, in files, read at several rates around that at which a page takes as long to fetch as to
compute. Each way is forced, then the cost model chooses. Knows an engine and its clock; nothing of
models.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.bench import Result, TokenArray
from quire.bench.gpu.driving import Drive
from quire.manager import Way
from quire.progress import Count
from quire.types import Tier

RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
_RIGHT = 1.05
"""A choice is right if that way takes at most so many times as long as the best."""


def measure(
    drive: Drive,
    prompt: TokenArray,
    folder: Path,
    *,
    ratios: Sequence[float] = RATIOS,
    repeats: int = 3,
    progress: Count = lambda done, of: None,
) -> Result:
    """`folder`: where the files are put. `ratios`: of the time in which a page is fetched to that
    in which it is computed, at most: a disk is not made faster. The device must have room for the
    prompt, and the host for it twice. Leaves a store attached. Raises EngineError."""
    store = f"file://{folder}/crossover?max=1TiB"
    drive.engine.attach_and_wait(store)
    run = _Crossover(drive, prompt, repeats)
    drive.first_token_s(prompt)
    computed_s = run.taken(Way.COMPUTE).seconds
    page_bytes = drive.engine.info.tiers[0].page_bytes
    rows = []
    for done, ratio in enumerate(ratios):
        progress(done, len(ratios))
        rate = run.num_pages * page_bytes / (computed_s * ratio)
        drive.engine.attach_and_wait(f"faulty+{store}&rate={max(1, round(rate))}")
        rows.append({"ratio": ratio, "bytes_s": rate} | run.row(computed_s))
    progress(len(ratios), len(ratios))
    return {
        "tokens": len(prompt),
        "rows": rows,
        "right_share": statistics.mean(row["right_share"] for row in rows),
        "best_gain": max(row["gain"] for row in rows),
    }


@dataclass(frozen=True, slots=True)
class _Taken:
    seconds: float
    """Until the first token; the median."""
    ways: list[Way]
    """That were gone, each time."""


class _Crossover:
    def __init__(self, drive: Drive, prompt: TokenArray, repeats: int) -> None:
        self._drive = drive
        self._prompt = prompt
        self.num_pages = (len(prompt) - 1) // drive.engine.info.page_size
        self._repeats = repeats

    def row(self, computed_s: float) -> Result:
        """Fetching and both also teach the cost model this store's rate, before it chooses."""
        seconds = {
            Way.COMPUTE: computed_s,
            Way.FETCH: self.taken(Way.FETCH).seconds,
            Way.BOTH: self.taken(Way.BOTH).seconds,
        }
        met = self._met()
        chosen, best_s = self.taken(None), min(seconds.values())
        reckoned = self._drive.engine.manager.costs.times(self.num_pages)
        right = [seconds[way] <= _RIGHT * best_s for way in chosen.ways]
        return {f"{way}_ms": taken * 1e3 for way, taken in seconds.items()} | {
            "chosen_ms": chosen.seconds * 1e3,
            "chosen": [way.value for way in chosen.ways],
            "gain": min(seconds[Way.COMPUTE], seconds[Way.FETCH]) / seconds[Way.BOTH],
            "right_share": statistics.mean(right),
            "met": met,
            "reckoned_ms": {}
            if reckoned is None
            else {name.removesuffix("_s"): took * 1e3 for name, took in reckoned._asdict().items()},
        }

    def _met(self) -> Result:
        """Of one meeting more: pages that were computed, fetched, and overtaken by the request; how
        long it took, and how much of that the model was busy."""
        engine = self._drive.engine
        counters = engine.manager.counters
        met, overtaken = counters.met_pages, counters.overtaken_pages
        busy_s = engine.status().seconds["model"]
        took = self.taken(Way.BOTH, repeats=1)
        fetched = counters.met_pages - met
        return {
            "fetched_pages": fetched,
            "computed_pages": self.num_pages - fetched,
            "overtaken_pages": counters.overtaken_pages - overtaken,
            "ms": took.seconds * 1e3,
            "model_ms": (engine.status().seconds["model"] - busy_s) * 1e3,
        }

    def taken(self, way: Way | None, repeats: int | None = None) -> _Taken:
        """With the prompt in the store and nowhere else. None: as the cost model chooses."""
        drive, manager = self._drive, self._drive.engine.manager
        seconds, ways = [], []
        manager.costs.force(way)
        for _ in range(repeats or self._repeats):
            drive.forget(Tier.DEVICE, Tier.HOST)
            before = manager.counters.meetings
            took, cached = drive.first_token_s(self._prompt)
            seconds.append(took)
            met = manager.counters.meetings > before
            ways.append(Way.BOTH if met else Way.FETCH if cached.store else Way.COMPUTE)
        manager.costs.force(None)
        return _Taken(statistics.median(seconds), ways)
