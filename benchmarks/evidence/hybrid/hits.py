"""Time to first token of one prompt, computed and then found in each tier in turn.

    cold    nobody has seen the prompt
    L1      the same again
    L2      after the device was flushed
    L3      after device and host were flushed, once all is written to the store

A hit counts only if every full page before the last token came from the tier that it is measured
for, and if the greedy answer is the cold one's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from quire.bench import TokenArray
from quire.bench.gpu.driving import Drive, Heard
from quire.engine.messages import CachedTokens
from quire.types import Tier

Result = dict[str, Any]

CASES: dict[str, tuple[str | None, tuple[Tier, ...]]] = {
    "cold": (None, ()),
    "L1": ("device", ()),
    "L2": ("host", (Tier.DEVICE,)),
    "L3": ("store", (Tier.DEVICE, Tier.HOST)),
}
"""name → the tier that must answer, the tiers flushed before."""


def measure(
    drive: Drive,
    prompts: Sequence[TokenArray],
    output_tokens: int,
    page_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Result:
    """`progress` gets the number of requests made. Raises EngineError."""
    samples: list[Result] = []
    for number, prompt in enumerate(prompts):
        reusable = (len(prompt) - 1) // page_size * page_size
        cold: Heard | None = None
        for name, (tier, flushed) in CASES.items():
            drive.forget(*flushed)
            answer = drive.ask(prompt, output_tokens)
            cold = cold or answer
            expected = CachedTokens() if tier is None else CachedTokens(**{tier: reusable})
            samples.append(
                {
                    "prompt": number,
                    "case": name,
                    "ttft_s": answer.first_token_s,
                    "ttft_cpu_s": answer.first_token_cpu_s,
                    "total_s": answer.total_s,
                    "cached": {t: getattr(answer.reused, t) for t in ("device", "host", "store")},
                    "is_as_meant": answer.reused == expected,
                    "is_same_answer": answer.tokens == cold.tokens,
                }
            )
            progress(len(samples))
    drive.settle()
    return summed_up(samples)


def summed_up(samples: Sequence[Result]) -> Result:
    """Speed-ups are those of the rounds, each hit beside the cold one just before it."""

    def column(case: str, name: str) -> list[Any]:
        return [sample[name] for sample in samples if sample["case"] == case]

    def ratios(case: str, name: str) -> list[float]:
        return [a / b for a, b in zip(column("cold", name), column(case, name), strict=True)]

    cases = {
        case: {
            "ttft_s": statistics.median(column(case, "ttft_s")),
            "ttft_cpu_s": statistics.median(column(case, "ttft_cpu_s")),
            "speedup": statistics.median(ratios(case, "ttft_s")),
            "speedup_min": min(ratios(case, "ttft_s")),
            "speedup_max": max(ratios(case, "ttft_s")),
            "cpu_speedup": statistics.median(ratios(case, "ttft_cpu_s")),
            "cpu_speedup_min": min(ratios(case, "ttft_cpu_s")),
            "as_meant": sum(column(case, "is_as_meant")),
            "same_answer": sum(column(case, "is_same_answer")),
            "of": len(column(case, "ttft_s")),
        }
        for case in CASES
    }
    return {
        "ok": all(sample["is_as_meant"] and sample["is_same_answer"] for sample in samples),
        "slowest_hit_speedup": min(cases[name]["speedup"] for name in ("L2", "L3")),
        "cases": cases,
        "samples": list(samples),
    }
