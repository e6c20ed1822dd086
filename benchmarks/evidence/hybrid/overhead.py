"""What snapshots cost when nothing is ever reused: one engine that takes them, one that does not.

Every round asks both engines the same new prompt, and they take turns at every step, so that what
slows the machine down for a moment slows both; who goes first alternates:

    with       step       step       step   …   settle
    without         step       step       step         settle

After each step there is a pause in which the copies and writes that it has set off go on: their
processor time, which is that of the whole process, is counted for the engine that caused them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from evidence.cost import summed_up
from quire.bench import TokenArray
from quire.bench.gpu.driving import Drive, greedy

Result = dict[str, Any]

WITH, WITHOUT = "snapshots_on", "snapshots_off"
_PAUSE_S = 0.03


def measure(
    drives: dict[str, Drive],
    prompts: Sequence[TokenArray],
    output_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """`drives`: WITH and WITHOUT. One round per prompt, the first not counted.

    Raises EngineError.
    """
    rounds: list[Result] = []
    for number, prompt in enumerate(prompts):
        order = (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH)
        meters = {name: _Meter(drives[name], prompt, output_tokens) for name in order}
        while not all(meter.heard.is_over for meter in meters.values()):
            for meter in meters.values():
                meter.step()
        rounds.append({"first": order[0]} | {name: m.finish() for name, m in meters.items()})
        progress(2 * len(rounds))
    return summed_up(rounds[1:], WITH, WITHOUT)


class _Meter:
    """Time that one engine takes for one request."""

    def __init__(self, drive: Drive, prompt: TokenArray, output_tokens: int) -> None:
        self._drive = drive
        self._total_s = self._cpu_s = self._ttft_s = 0.0
        with self._counted():
            self.heard = drive.begin(prompt, greedy(output_tokens))

    def step(self) -> None:
        if self.heard.is_over:
            return
        is_first = not self.heard.tokens
        with self._counted():
            self._drive.step()
        if is_first:
            self._ttft_s = self._total_s

    def finish(self) -> Result:
        before = time.process_time()
        self._drive.settle()
        self._cpu_s += time.process_time() - before
        return {
            "total_s": self._total_s,
            "ttft_s": self._ttft_s,
            "cpu_s": self._cpu_s,
            "cached_tokens": self.heard.reused.total,
            "answer": self.heard.tokens,
        }

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        before, cpu_before = time.perf_counter(), time.process_time()
        yield
        self._total_s += time.perf_counter() - before
        time.sleep(_PAUSE_S)
        self._cpu_s += time.process_time() - cpu_before
