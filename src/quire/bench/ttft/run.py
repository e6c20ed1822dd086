"""`quire bench ttft`: time to first token of a prompt, computed and then found in each tier.

    cold    nobody has seen the prompt
    L1      the same again
    L2      after the device was flushed
    L3      after device and host were flushed, once all is written to the store

A real server process on this machine, with a store of its own that is removed afterwards. Each
answer says how many of its tokens came from which tier; a hit counts only if nearly all came from
the tier that it is measured for, and if the greedy answer is the cold one's.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench import Result
from quire.bench.prose import Prose
from quire.bench.serve.chatting import ChatAnswer
from quire.bench.ttft.warm_server import WarmServer, started
from quire.progress import Progress
from quire.sizes import format_bytes

GIB = 1 << 30
CUDA_DEVICE_BYTES = 8 * GIB
"""Unless told otherwise: what else is on the GPU is left room."""
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


@dataclass(frozen=True, slots=True)
class ServedTiers:
    """What the server is started with."""

    model: Path
    """A directory as transformers saves it."""
    device: str = "cpu"
    device_bytes: int = GIB
    host_bytes: int = 2 * GIB
    directory: Path | None = None
    """For the store; None: the temporary directory."""

    @property
    def arguments(self) -> list[str]:
        """Without host and store."""
        words = ["--port", "0", "--model", str(self.model), "--device", self.device]
        return [*words, "--device-memory", str(self.device_bytes)]

    def lower_tiers(self, folder: Path) -> list[str]:
        store = f"{(folder / 'store').as_uri()}?max={max(4 * self.host_bytes, 4 * GIB)}"
        return ["--host-memory", str(self.host_bytes), "--store", store]

    def about(self) -> Result:
        return {
            "model": self.model.name,
            "device": self.device,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }


def run(
    tiers: ServedTiers,
    *,
    prompt_tokens: int = 4000,
    repeats: int = 5,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """`repeats`: prompts tried in every tier. Raises EngineError."""

    async def measured(folder: Path) -> Result:
        prose, total = Prose(seed), repeats * len(CASES)
        arguments = [*tiers.arguments, *tiers.lower_tiers(folder)]
        async with started("with all tiers", arguments, prose, progress) as server:
            prompts = server.prompts(prose, repeats, prompt_tokens)
            return await measure(server, prompts, lambda done: progress("hits", done, total))

    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=tiers.directory) as folder:
        found = asyncio.run(measured(Path(folder)))
    return {**tiers.about(), "hits": found, "ok": found["ok"]}


def describe(result: Result) -> str:
    return (
        f"{result['model']} on {result['device']}, L1 {format_bytes(result['device_bytes'])}, "
        f"L2 {format_bytes(result['host_bytes'])}, L3 on disk"
    )


async def measure(
    server: WarmServer, prompts: Sequence[str], progress: Callable[[int], None]
) -> Result:
    """`progress` gets the number of requests made. Raises EngineError."""
    samples: list[Result] = []
    for number, prompt in enumerate(prompts):
        cold: ChatAnswer | None = None
        for case, (tier, flushed) in CASES.items():
            await server.wait_idle()
            if flushed:
                await server.flush(flushed)
            answer = await server.ask(prompt, OUTPUT_TOKENS)
            cold = cold or answer
            cached, prompt_tokens = dict(answer.cached or {}), answer.prompt_tokens or 0
            found = sum(cached.values()) if tier is None else cached.get(tier, 0)
            is_as_meant = found == 0 if tier is None else found >= HIT_SHARE * prompt_tokens
            samples.append(
                {
                    "prompt": number,
                    "case": case,
                    "ttft_s": answer.ttft_s,
                    "total_s": answer.total_s,
                    "prompt_tokens": prompt_tokens,
                    "cached": cached,
                    "is_as_meant": prompt_tokens > 0 and is_as_meant,
                    "is_same_answer": answer.text == cold.text,
                }
            )
            progress(len(samples))
    return summed_up(samples)


def summed_up(samples: Sequence[Result]) -> Result:
    def column(case: str, name: str) -> list[Any]:
        return [sample[name] for sample in samples if sample["case"] == case]

    cases, cold = {}, column("cold", "ttft_s")
    for case in CASES:
        times = column(case, "ttft_s")
        ratios = [before / after for before, after in zip(cold, times, strict=True)]
        cases[case] = {
            "ttft_s": statistics.median(times),
            "speedup": statistics.median(cold) / statistics.median(times),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "as_meant": sum(column(case, "is_as_meant")),
            "same_answer": sum(column(case, "is_same_answer")),
            "of": len(times),
        }
    return {
        "prompt_tokens": statistics.median(sample["prompt_tokens"] for sample in samples),
        "ok": all(sample["is_as_meant"] and sample["is_same_answer"] for sample in samples),
        "slowest_hit_speedup": min(cases[name]["speedup"] for name in CASES if name != "cold"),
        "cases": cases,
        "samples": list(samples),
    }
