"""`quire bench hybrid`: what a hit saves a model with recurrent layers or windows, and what its
snapshots cost when nothing is reused.

Engines in this process, with stores of their own that are removed afterwards; both parts in one
run, so that their figures are of the same machine at the same time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evidence.hybrid import hits, overhead
from evidence.hybrid.model import NAME, write_model
from evidence.hybrid.overhead import WITH, WITHOUT
from quire.bench import TokenArray
from quire.bench.gpu.driving import Drive
from quire.config import PrefetchPolicy
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.layouts import FULL, RECURRENT, layouts
from quire.errors import ConfigError
from quire.models import ModelShape, describe
from quire.progress import Progress

TARGET_SPEEDUP = 10.0
TARGET_OVERHEAD = 0.03
OUTPUT_TOKENS = 16

_DTYPE = "float32"
_DEVICE_SEQUENCES, _HOST_SEQUENCES, _STORE_SEQUENCES = 4, 8, 32
"""So many prompts fit: more than are in use, fewer than come, so that pools are full as usual."""
_STATES_PER_SEQUENCE = 3
_WARM_UP_SHARE = 4

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path | None = None
    """A directory as transformers saves it; None: one of random weights."""
    tokens: int = 4000
    """Of each prompt."""
    repeats: int = 5
    """Prompts for the hits; 0 leaves that part out."""
    rounds: int = 12
    """For the overhead; 0 leaves that part out."""
    page_size: int = 16
    threads: int = 2
    seed: int = 0


def run(plan: Plan, progress: Progress = lambda what, done, total: None) -> Result:
    """Raises ConfigError, ModelError, MemoryBudgetError, EngineError."""
    if plan.tokens < 2 * plan.page_size:
        raise ConfigError(
            f"--tokens {plan.tokens} is too short to be found again: give at least "
            f"{2 * plan.page_size}, two pages"
        )
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        model = plan.model
        if model is None:
            progress("making a model", 0, 1)
            model = Path(folder) / "model"
            write_model(model)
            progress("making a model", 1, 1)
        return _Run(plan, model, Path(folder), progress).run()


class _Run:
    def __init__(self, plan: Plan, model: Path, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._model = model
        self._folder = folder
        self._progress = progress
        self._shape = describe(model)
        self._chance = np.random.default_rng(plan.seed)
        longest = self._shape.max_position_embeddings - OUTPUT_TOKENS
        if plan.tokens > longest:
            raise ConfigError(
                f"--tokens {plan.tokens} is more than the model takes: give at most {longest}"
            )
        self._has_snapshots = bool(self._shape.recurrent_layers)
        if not plan.repeats and not (plan.rounds and self._has_snapshots):
            why = "" if self._has_snapshots else ", as the model has no snapshots to leave out"
            raise ConfigError(f"nothing would be measured{why}: raise --repeats")

    def run(self) -> Result:
        plan, load_before = self._plan, os.getloadavg()
        result: Result = {
            "model": self._describe_model(),
            "tokens": plan.tokens,
            "output_tokens": OUTPUT_TOKENS,
            "page_size": plan.page_size,
            "threads": plan.threads,
            "cores": len(os.sched_getaffinity(0)),
            "targets": {"speedup": TARGET_SPEEDUP, "overhead": TARGET_OVERHEAD},
        }
        with self._engine(WITH) as on:
            self._warm_up(on)
            if plan.repeats:
                result["hits"] = self._hits(on)
            if plan.rounds and self._has_snapshots:
                with self._engine(WITHOUT) as off:
                    self._warm_up(off)
                    result["overhead"] = self._overhead({WITH: on, WITHOUT: off})
        result["load"] = {"before": list(load_before), "after": list(os.getloadavg())}
        result["ok"] = all(result[part]["ok"] for part in ("hits", "overhead") if part in result)
        return result

    def _hits(self, drive: Drive) -> Result:
        prompts = self._prompts(self._plan.repeats)
        total = len(prompts) * len(hits.CASES)
        return hits.measure(
            drive,
            prompts,
            OUTPUT_TOKENS,
            self._plan.page_size,
            lambda done: self._progress("hits", done, total),
        )

    def _overhead(self, drives: dict[str, Drive]) -> Result:
        prompts = self._prompts(self._plan.rounds + 1)  # the first is not counted
        return overhead.measure(
            drives,
            prompts,
            OUTPUT_TOKENS,
            lambda done: self._progress("cost when nothing is reused", done, 2 * len(prompts)),
        )

    def _warm_up(self, drive: Drive) -> None:
        """The first requests of a process are slower: buffers, thread pools, lazy imports."""
        plan = self._plan
        length = max(2 * plan.page_size, plan.tokens // _WARM_UP_SHARE)
        hits.measure(drive, [self._prompt(length)], 2, plan.page_size)

    def _prompts(self, count: int) -> list[TokenArray]:
        return [self._prompt(self._plan.tokens) for _ in range(count)]

    def _prompt(self, length: int) -> TokenArray:
        return self._chance.integers(0, self._shape.vocab_size, length, dtype=np.int32)

    @contextlib.contextmanager
    def _engine(self, side: str) -> Iterator[Drive]:
        what = f"starting an engine, {side.replace('_', ' ')}"
        self._progress(what, 0, 1)
        engine = build_engine(self._config(side))
        self._progress(what, 1, 1)
        try:
            yield Drive(engine)
        finally:
            engine.close()

    def _config(self, side: str) -> EngineConfig:
        plan, sequence_bytes = self._plan, self._sequence_bytes()
        store_bytes = max(_STORE_SEQUENCES * sequence_bytes, 1 << 30)
        options: dict[str, Any] = {} if side == WITH else {"snapshots_per_path": 0}
        return EngineConfig(
            model=str(self._model),
            name="bench",
            dtype=_DTYPE,
            page_size=plan.page_size,
            device_bytes=_DEVICE_SEQUENCES * sequence_bytes,
            host_bytes=_HOST_SEQUENCES * sequence_bytes,
            store=f"{(self._folder / side).as_uri()}?max={store_bytes}",
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
            prefetch_threshold=plan.page_size,
            typical_tokens=plan.tokens,
            threads=plan.threads,
            **options,
        )

    def _sequence_bytes(self) -> int:
        """Of everything that a prompt leaves behind, and more for windows."""
        num_pages = -(-(self._plan.tokens + OUTPUT_TOKENS) // self._plan.page_size)
        return sum(
            layout.page_stride_bytes
            * (_STATES_PER_SEQUENCE if layout.component == RECURRENT else num_pages)
            for layout in self._layouts()
        )

    def _layouts(self) -> Any:
        shape = self._shape
        return layouts(
            shape, dtype=_DTYPE, page_size=self._plan.page_size, kv_heads=shape.num_kv_heads
        )

    def _describe_model(self) -> Result:
        shape: ModelShape = self._shape
        sizes = {layout.component: layout.page_bytes for layout in self._layouts()}
        return {
            "name": NAME if self._plan.model is None else self._plan.model.name,
            "parameters": shape.num_parameters,
            "layers": {
                "full": len(shape.full_layers),
                "window": len(shape.window_layers),
                "recurrent": len(shape.recurrent_layers),
            },
            "full_bytes_per_token": sizes[FULL] // self._plan.page_size,
            "snapshot_bytes": sizes.get(RECURRENT, 0),
        }
