"""`quire bench ttft`: what a hit in each tier saves.

A real server process on this machine, with a store of its own that is removed afterwards.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.prose import Prose
from quire.bench.ttft import hits
from quire.bench.ttft.warm_server import started
from quire.progress import Progress
from quire.sizes import format_bytes

GIB = 1 << 30
CUDA_DEVICE_BYTES = 8 * GIB
"""Unless told otherwise: what else is on the GPU is left room."""

Result = dict[str, Any]


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

    async def measure(folder: Path) -> Result:
        prose, total = Prose(seed), repeats * len(hits.CASES)
        arguments = [*tiers.arguments, *tiers.lower_tiers(folder)]
        async with started("with all tiers", arguments, prose, progress) as server:
            prompts = server.prompts(prose, repeats, prompt_tokens)
            return await hits.measure(server, prompts, lambda done: progress("hits", done, total))

    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=tiers.directory) as folder:
        found = asyncio.run(measure(Path(folder)))
    return {**tiers.about(), "hits": found, "ok": found["ok"]}


def describe(result: Result) -> str:
    return (
        f"{result['model']} on {result['device']}, L1 {format_bytes(result['device_bytes'])}, "
        f"L2 {format_bytes(result['host_bytes'])}, L3 on disk"
    )
