"""What snapshots cost when nothing is ever reused: one engine that takes them, one that does not.

Every round asks both engines the same new prompt, one after the other, and who goes first
alternates (A B, B A, A B, …), so that what slows the machine down for a while slows both. After
each request the engine is run until its copies and writes have ended: their processor time, which
is that of the whole process, is counted for the request that caused them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.bench.hybrid.driver import Driver, Tokens
from quire.bench.stats import ratio, summary

Result = dict[str, Any]

WITH, WITHOUT = "snapshots_on", "snapshots_off"
TIMES = ("total_s", "ttft_s", "cpu_s")


def measure(
    drivers: dict[str, Driver],
    prompts: Sequence[Tokens],
    output_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """`drivers`: WITH and WITHOUT. One round per prompt, the first not counted.

    Raises EngineError.
    """
    rounds: list[Result] = []
    for number, prompt in enumerate(prompts):
        order = (WITH, WITHOUT) if number % 2 == 0 else (WITHOUT, WITH)
        samples = {name: _one(drivers[name], prompt, output_tokens) for name in order}
        rounds.append({"first": order[0], **samples})
        progress(2 * len(rounds))
    return summed_up(rounds[1:])


def _one(driver: Driver, prompt: Tokens, output_tokens: int) -> Result:
    before = time.process_time()
    answer = driver.ask(prompt, output_tokens)
    settled_s = driver.settle()
    return {
        "total_s": answer.total_s,
        "ttft_s": answer.ttft_s,
        "settled_s": settled_s,
        "cpu_s": time.process_time() - before,
        "cached_tokens": answer.cached.total,
        "answer": answer.tokens,
    }


def summed_up(rounds: Sequence[Result]) -> Result:
    def column(side: str, name: str) -> list[Any]:
        return [one[side][name] for one in rounds]

    def compared(name: str) -> Result:
        return {
            WITH: summary(column(WITH, name)),
            WITHOUT: summary(column(WITHOUT, name)),
            "ratio": ratio(column(WITH, name), column(WITHOUT, name)),
        }

    reused = sum(column(WITH, "cached_tokens") + column(WITHOUT, "cached_tokens"))
    pairs = zip(column(WITH, "answer"), column(WITHOUT, "answer"), strict=True)
    same = sum(ours == theirs for ours, theirs in pairs)
    return {
        "rounds": len(rounds),
        "ok": same == len(rounds) and reused == 0,
        "same_answer": same,
        "reused_tokens": reused,
        **{name: compared(name) for name in TIMES},
        "samples": [
            {"first": one["first"]} | {side: _figures(one[side]) for side in (WITH, WITHOUT)}
            for one in rounds
        ],
    }


def _figures(sample: Result) -> Result:
    return {name: value for name, value in sample.items() if name != "answer"}
