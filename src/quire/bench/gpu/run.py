"""`quire bench gpu`: decoding, prompts and hits, each beside its floor.

One engine in this process, without a server, on a model of a real shape with random weights. All
host work of a step counts; sockets and HTTP do not.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from quire.bench.gpu.drive import Drive, Tokens
from quire.bench.gpu.floors import Machine, Needs, measure
from quire.bench.gpu.model import write_model
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.forward.spec import dense_spec
from quire.engine.messages import SamplingParams
from quire.models import describe, read_config
from quire.types import Tier

Progress = Callable[[str, int, int], None]
Result = dict[str, Any]

_GREEDY = SamplingParams(max_tokens=1, temperature=0)
_DRAWN = SamplingParams(
    max_tokens=1, temperature=0.8, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.1
)
_REPEATS = 3
SMALL: dict[str, Any] = {
    "decode": ((1, 64), (4, 64)),
    "decode_tokens": 8,
    "prompts": ((512, 512), (512, 128)),
    "hits": (128, 512),
}
"""Of a plan: to try it without an accelerator."""


@dataclass(frozen=True, slots=True)
class Plan:
    shape: str = "qwen3-8b"
    device: str = "cuda"
    page_size: int = 64
    decode: tuple[tuple[int, int], ...] = (
        (1, 1024),
        (1, 8192),
        (64, 1024),
        (64, 3584),
        (128, 1024),
    )
    """Requests at once, and the context of each."""
    decode_tokens: int = 64
    prompts: tuple[tuple[int, int], ...] = ((8192, 8192), (32768, 8192), (32768, 2048))
    """Tokens, and of each chunk."""
    hits: tuple[int, ...] = (1024, 8192, 32768)
    device_bytes: int = 60 << 30
    host_bytes: int = 16 << 30
    seed: int = 0
    model: Path | None = None
    """Where the random weights are, or shall be, kept; None: not at all."""


def run(plan: Plan, progress: Progress = lambda what, done, of: None) -> Result:
    """Raises ConfigError, MemoryBudgetError, EngineError."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        return _Run(plan, Path(folder), progress).run()


class _Run:
    def __init__(self, plan: Plan, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._device = torch.device(plan.device)
        self._chance = np.random.default_rng(plan.seed)

    def run(self) -> Result:
        plan = self._plan
        self._progress("what the machine does", 0, 1)
        machine = measure(self._device)
        model = plan.model or self._folder / "model"
        if not model.exists():
            write_model(
                model,
                plan.shape,
                device=self._device,
                progress=lambda done, of: self._progress("random weights", done, of),
            )
        result: Result = {"shape": plan.shape, "machine": asdict(machine)}
        with self._engine(model) as drive:
            self._vocab_size = drive.engine.info.vocab_size
            text = read_config(model).get_text_config()
            needs = Needs.of(dense_spec(text, describe(model)))
            self._warm_up(drive)
            result["decode"] = self._decode(drive, machine, needs)
            result["prompts"] = self._prompts(drive, machine, needs)
            result["hits"] = self._hits(drive, machine, needs)
        return result

    @contextlib.contextmanager
    def _engine(self, model: Path) -> Iterator[Drive]:
        plan = self._plan
        engine = build_engine(
            EngineConfig(
                model=str(model),
                name=plan.shape,
                device=plan.device,
                dtype="bfloat16",
                page_size=plan.page_size,
                device_bytes=plan.device_bytes,
                host_bytes=plan.host_bytes,
                store=f"file://{self._folder}/store?max=40GiB",
                max_running=max(batch for batch, _ in plan.decode),
                chunk_tokens=max(chunk for _, chunk in plan.prompts),
            ),
            lambda what, done: self._progress(what, int(done * 100), 100),
        )
        try:
            yield Drive(engine)
        finally:
            engine.close()

    def _warm_up(self, drive: Drive) -> None:
        """The first batches of a process choose and compile kernels."""
        for chunk in {chunk for _, chunk in self._plan.prompts}:
            drive.engine.scheduler.chunk_tokens = chunk
            drive.first_token_s(self._prompt(2 * chunk + 7))
        drive.forget(Tier.DEVICE, Tier.HOST)

    def _decode(self, drive: Drive, machine: Machine, needs: Needs) -> list[Result]:
        plan, rows = self._plan, []
        for i, (batch, context) in enumerate(plan.decode):
            self._progress("decoding", i, len(plan.decode))
            floor_ms = needs.decode_s(machine, batch, context) * 1e3
            row: Result = {"batch": batch, "context": context, "floor_ms": floor_ms}
            for name, options in (("greedy_ms", _GREEDY), ("drawn_ms", _DRAWN)):
                prompts = [self._prompt(context) for _ in range(batch)]
                most = 4 * plan.decode_tokens + batch
                params = msgspec.structs.replace(options, max_tokens=most)
                row[name] = drive.decode_ms(prompts, params, plan.decode_tokens)
                drive.forget(Tier.DEVICE, Tier.HOST)
            row["share_of_floor"] = floor_ms / row["greedy_ms"]
            rows.append(row)
        return rows

    def _prompts(self, drive: Drive, machine: Machine, needs: Needs) -> list[Result]:
        plan, rows = self._plan, []
        for i, (tokens, chunk) in enumerate(plan.prompts):
            self._progress("prompts", i, len(plan.prompts))
            drive.engine.scheduler.chunk_tokens = chunk
            seconds = []
            for _ in range(_REPEATS):
                seconds.append(drive.first_token_s(self._prompt(tokens))[0])
                drive.forget(Tier.DEVICE, Tier.HOST)
            took, ops = sorted(seconds)[_REPEATS // 2], needs.prompt_ops(tokens)
            rows.append(
                {
                    "tokens": tokens,
                    "chunk": chunk,
                    "ms": took * 1e3,
                    "floor_ms": ops / machine.matmul_ops_s * 1e3,
                    "tflops": ops / took / 1e12,
                    "share_of_floor": ops / machine.matmul_ops_s / took,
                }
            )
        return rows

    def _hits(self, drive: Drive, machine: Machine, needs: Needs) -> list[Result]:
        plan, rows = self._plan, []
        step_s = needs.decode_s(machine, 1, 0)
        for i, tokens in enumerate(plan.hits):
            self._progress("hits", i, len(plan.hits))
            prompt = self._prompt(tokens)
            computed_s, _ = drive.first_token_s(prompt)
            row: Result = {
                "tokens": tokens,
                "computed_ms": computed_s * 1e3,
                "floor_ms": (step_s + tokens * needs.kv_bytes / machine.link_bytes_s) * 1e3,
            }
            for tier, gone in (
                ("device", ()),
                ("host", (Tier.DEVICE,)),
                ("store", (Tier.DEVICE, Tier.HOST)),
            ):
                seconds = []
                for _ in range(_REPEATS):
                    drive.forget(*gone)
                    took, cached = drive.first_token_s(prompt)
                    seconds.append(took)
                    row[f"{tier}_tokens"] = getattr(cached, tier)
                row[f"{tier}_ms"] = sorted(seconds)[_REPEATS // 2] * 1e3
            rows.append(row)
            drive.forget(Tier.DEVICE, Tier.HOST)
        return rows

    def _prompt(self, length: int) -> Tokens:
        return self._chance.integers(0, self._vocab_size, length, dtype=np.int32)
