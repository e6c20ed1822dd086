"""Rig: what the parts of `quire bench gpu` share: the machine as measured, a model, engines."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from quire.bench import TokenArray, anystore
from quire.bench.gpu.driving import Drive
from quire.bench.gpu.floors import MachineSpeed, Needs, measure
from quire.bench.gpu.plan import GpuPlan
from quire.bench.gpu.random_model import RandomModel, write_outline
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.errors import StoreError
from quire.progress import Progress
from quire.types import Tier

_STORE_SIZE = "24GiB"


class Rig:
    def __init__(self, plan: GpuPlan, folder: Path, stores: Path, progress: Progress) -> None:
        """`folder`, `stores`: for what describes the model, and for files of stores. Raises
        ConfigError."""
        self.plan = plan
        self.progress = progress
        self.device = torch.device(plan.device)
        progress("what the machine does", 0, 1)
        self.machine: MachineSpeed = measure(self.device)
        self._stores = stores
        self._model = folder / "model"
        progress("random weights", 0, 1)
        self.spec = write_outline(self._model, plan.shape)
        self._made = RandomModel(self.spec, torch.bfloat16, self.device).make()
        """One for all engines."""
        self.needs = Needs.of(self.spec)
        self._chance = np.random.default_rng(plan.seed)
        self._store: Path | None = None
        self._others: dict[int, Drive] = {}
        """By the size of their chunks; what closes them:"""
        self._opened = contextlib.ExitStack()

    def prompt(self, length: int) -> TokenArray:
        """One that nobody has seen."""
        return self._chance.integers(0, self.spec.vocab_size, length, dtype=np.int32)

    def shuffled(self, count: int) -> list[int]:
        return [int(i) for i in self._chance.permutation(count)]

    @contextlib.contextmanager
    def engine(
        self,
        *,
        device_bytes: int | None = None,
        host_bytes: int | None = None,
        chunk_tokens: int | None = None,
    ) -> Iterator[Drive]:
        """Warm. By default as the plan says."""
        gc.collect()  # engines are circles: what an earlier one held is held until now
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        plan = self.plan
        chunk = chunk_tokens or plan.chunk_tokens
        engine = build_engine(
            EngineConfig(
                model=str(self._model),
                name=plan.shape,
                device=plan.device,
                dtype="bfloat16",
                page_size=plan.page_size,
                device_bytes=plan.device_bytes if device_bytes is None else device_bytes,
                host_bytes=plan.host_bytes if host_bytes is None else host_bytes,
                max_running=plan.max_running,
                chunk_tokens=chunk,
            ),
            lambda what, done: self.progress(what, int(done * 100), 100),
            model=self._made,
        )
        try:
            drive = Drive(engine)
            # The first batches of a process choose kernels.
            drive.first_token_s(self.prompt(min(2 * chunk + 7, drive.engine.info.max_context - 1)))
            drive.forget(Tier.DEVICE, Tier.HOST)
            yield drive
        finally:
            engine.close()

    def by_chunk(self, drive: Drive) -> Iterator[tuple[int, Drive]]:
        """Every size of chunks that prompts are computed in, and an engine for it: `drive` for its
        own, and others, without a host, for the others. Those are kept until `close`."""
        plan = self.plan
        for chunk in sorted({chunk for _, chunk in plan.prompts}, reverse=True):
            if chunk == plan.chunk_tokens:
                yield chunk, drive
                continue
            if chunk not in self._others:
                self._others[chunk] = self._opened.enter_context(
                    self.engine(
                        device_bytes=plan.chunked_tokens * self.needs.kv_bytes,
                        host_bytes=0,
                        chunk_tokens=chunk,
                    )
                )
            yield chunk, self._others[chunk]

    def close(self) -> None:
        """Those others; they are opened again if need be."""
        self._others.clear()
        self._opened.close()

    def disk_bytes_s(self) -> float | None:
        """Of files where stores are put, read directly; None: they cannot be."""
        page_bytes = self.plan.page_size * self.needs.kv_bytes
        try:
            found = anystore.run(
                self._stores.absolute().as_uri(),
                page_bytes=min(page_bytes, self.plan.disk_bytes),
                total_bytes=self.plan.disk_bytes,
                rounds=2,
            )
        except (StoreError, OSError):
            return None
        return float(found["read"]["raw_gb_s"] * 1e9)

    def new_folder(self) -> Path:
        """For files of a store."""
        return Path(tempfile.mkdtemp(prefix="store-", dir=self._stores))

    def attach(self, drive: Drive) -> None:
        """A store of its own, in files; the one before is removed."""
        before = self._store
        self._store = self.new_folder()
        drive.engine.attach_and_wait(f"{self._store.as_uri()}?max={_STORE_SIZE}")
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def detach(self, drive: Drive) -> None:
        """Its store: a part leaves the engine as it found it."""
        drive.settle()
        drive.engine.manager.store.detach()
        drive.settle()
