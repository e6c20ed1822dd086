"""Crossover: where fetching a prompt begins to be slower than computing it, and both at once.

One prompt, in files, read at several rates around that at which a page takes as long to fetch as to
compute. Each way is forced, then the cost model chooses. Knows an engine and its clock; nothing of
models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.bench.gpu.drive import Drive, Tokens
from quire.manager import Way
from quire.types import Tier

Result = dict[str, Any]

RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
_RIGHT = 1.05
"""A choice is right if it takes at most so many times as long as the best way."""


def measure(
    drive: Drive,
    prompt: Tokens,
    folder: Path,
    *,
    ratios: Sequence[float] = RATIOS,
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Result:
    """`folder`: where the files are put. `ratios`: of the time in which a page is fetched to that
    in which it is computed, at most: a disk is not made faster. The device must have room for the
    prompt, and the host for it twice. Leaves a store attached. Raises EngineError."""
    store = f"file://{folder}/crossover?max=1TiB"
    drive.engine.attach_and_wait(store)
    run = _Crossover(drive, prompt, repeats)
    drive.first_token_s(prompt)
    computed_s = run.taken_s(Way.COMPUTE)
    info = drive.engine.info
    num_pages = (len(prompt) - 1) // info.page_size
    rows = []
    for done, ratio in enumerate(ratios):
        progress(done, len(ratios))
        rate = num_pages * info.tiers[0].page_bytes / (computed_s * ratio)
        drive.engine.attach_and_wait(f"faulty+{store}&rate={max(1, round(rate))}")
        rows.append({"ratio": ratio, "bytes_s": rate} | run.row(computed_s))
    progress(len(ratios), len(ratios))
    return {
        "tokens": len(prompt),
        "rows": rows,
        "right_share": statistics.mean(row["right"] for row in rows),
        "best_gain": max(row["gain"] for row in rows),
    }


class _Crossover:
    def __init__(self, drive: Drive, prompt: Tokens, repeats: int) -> None:
        self._drive = drive
        self._prompt = prompt
        self._repeats = repeats

    def row(self, computed_s: float) -> Result:
        """Fetching and both also teach the cost model this store's rate, before it chooses."""
        fetched_s, both_s = self.taken_s(Way.FETCH), self.taken_s(Way.BOTH)
        before = self._drive.engine.manager.counters.meetings
        chosen_s = self.taken_s(None)
        met = self._drive.engine.manager.counters.meetings > before
        alone_s = min(computed_s, fetched_s)
        return {
            "compute_ms": computed_s * 1e3,
            "fetch_ms": fetched_s * 1e3,
            "both_ms": both_s * 1e3,
            "chosen_ms": chosen_s * 1e3,
            "chosen": self._name(met),
            "gain": alone_s / both_s,
            "right": chosen_s <= _RIGHT * min(alone_s, both_s),
        }

    def taken_s(self, way: Way | None) -> float:
        """Until the first token, with the prompt in the store and nowhere else; the median."""
        drive, costs, seconds = self._drive, self._drive.engine.manager.costs, []
        costs.force(way)
        for _ in range(self._repeats):
            drive.forget(Tier.DEVICE, Tier.HOST)
            took, self._cached = drive.first_token_s(self._prompt)
            seconds.append(took)
        costs.force(None)
        return statistics.median(seconds)

    def _name(self, met: bool) -> str:
        """Of the way that was chosen last."""
        if met:
            return Way.BOTH.value
        return Way.FETCH.value if self._cached.store else Way.COMPUTE.value
