"""Time to first token of one prompt, computed and then found in each tier in turn.

    cold    nobody has seen the prompt
    L1      the same again
    L2      after the device was flushed
    L3      after device and host were flushed, once all is written to the store

Each answer says how many of its tokens came from which tier; a hit counts only if nearly all came
from the tier that it is measured for, and if the greedy answer is the cold one's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from quire.bench.serve.chatting import ChatAnswer
from quire.bench.ttft.warm_server import WarmServer

HIT_SHARE = 0.95
"""Of the prompt, at least; the last page is not full and its tokens are computed again."""
OUTPUT_TOKENS = 16

CASES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "cold": (None, ()),
    "L1": ("device", ()),
    "L2": ("host", ("device",)),
    "L3": ("store", ("device", "host")),
}
"""name → the tier that must answer, the tiers flushed before."""

Result = dict[str, Any]


async def measure(
    server: WarmServer, prompts: Sequence[str], progress: Callable[[int], None]
) -> Result:
    """`progress` gets the number of requests made. Raises EngineError."""
    samples: list[Result] = []
    for number, prompt in enumerate(prompts):
        cold: ChatAnswer | None = None
        for name, (tier, flushed) in CASES.items():
            await server.wait_idle()
            if flushed:
                await server.flush(flushed)
            answer = await server.ask(prompt, OUTPUT_TOKENS)
            cold = cold or answer
            samples.append(_sample(number, name, tier, answer, cold))
            progress(len(samples))
    return summed_up(samples)


def _sample(
    number: int, name: str, tier: str | None, answer: ChatAnswer, cold: ChatAnswer
) -> Result:
    cached, prompt_tokens = dict(answer.cached or {}), answer.prompt_tokens or 0
    if tier is None:
        is_as_meant = prompt_tokens > 0 and sum(cached.values()) == 0
    else:
        is_as_meant = prompt_tokens > 0 and cached.get(tier, 0) >= HIT_SHARE * prompt_tokens
    return {
        "prompt": number,
        "case": name,
        "ttft_s": answer.ttft_s,
        "total_s": answer.total_s,
        "prompt_tokens": prompt_tokens,
        "cached": cached,
        "is_as_meant": is_as_meant,
        "is_same_answer": answer.text == cold.text,
    }


def summed_up(samples: Sequence[Result]) -> Result:
    cases = {}
    cold = [sample["ttft_s"] for sample in samples if sample["case"] == "cold"]
    for name in CASES:
        own = [sample for sample in samples if sample["case"] == name]
        times = [sample["ttft_s"] for sample in own]
        ratios = [before / after for before, after in zip(cold, times, strict=True)]
        cases[name] = {
            "ttft_s": statistics.median(times),
            "all_ttft_s": times,
            "speedup": statistics.median(cold) / statistics.median(times),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "as_meant": sum(sample["is_as_meant"] for sample in own),
            "same_answer": sum(sample["is_same_answer"] for sample in own),
            "of": len(own),
        }
    return {
        "prompt_tokens": statistics.median(sample["prompt_tokens"] for sample in samples),
        "ok": all(sample["is_as_meant"] and sample["is_same_answer"] for sample in samples),
        "slowest_hit_speedup": min(cases[name]["speedup"] for name in CASES if name != "cold"),
        "cases": cases,
        "samples": list(samples),
    }
