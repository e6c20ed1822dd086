"""Many sessions restoring at once: host to device, beside one plain copy of the same bytes.

A real manager and a real worker. Every session's pages are on the host and nowhere else; then all
of them load at once, as after a flush, and the clock runs until the last page of the last one is
READY. Beside it, in the same round, the same copy engine moves the same host pages to the same
device pages in one operation. The ratio says what is lost by having many operations: to decisions,
to messages, to waiting for each other. 1 would be nothing. In the first and in the last round every
byte is compared afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.config import CacheConfig, PrefetchConfig
from quire.errors import EngineError
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager, Lease, LoadState
from quire.manager.inspection import inspect
from quire.memory.page_layout import PageLayout, smollm2_135m
from quire.progress import Progress
from quire.types import DEVICE, PageIds, RequestId, num_pages, page_array
from quire.worker import ComponentConfig, LocalWorkers, WorkerConfig, build_worker
from quire.worker.copies import ComponentPools

TARGET = 1.5
"""At most so many times as long as the plain copy."""

_WEIGHTS = "bench"
_POLL_S = 0.001
"""As an engine that has nothing to compute. On a CPU, looking more often slows the copies down:
the thread that carries them out and the one that looks share an interpreter."""
_TIMEOUT_S = 120.0

Result = dict[str, Any]


def qwen3_8b(page_size: int = 64, dtype: str = "bfloat16") -> PageLayout:
    """147,456 bytes per token in bf16."""
    return PageLayout("full", 36, 8, 128, dtype, page_size)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is restored; lengths in tokens."""

    layout: PageLayout
    sessions: int = 64
    tokens: int = 256
    rounds: int = 5

    @property
    def pages_each(self) -> int:
        return self.tokens // self.layout.page_size

    @property
    def num_pages(self) -> int:
        return self.sessions * self.pages_each


def plan_for(device: str) -> Plan:
    """On CUDA what an 8B model would restore (18 GB); on a CPU what fits a small machine."""
    if torch.device(device).type == "cuda":
        return Plan(qwen3_8b(), tokens=2_000)
    return Plan(smollm2_135m(16))


def run(
    device: str = "cpu", plan: Plan | None = None, progress: Progress = lambda *_: None
) -> Result:
    """Raises MemoryBudgetError; EngineError when the restores do not end."""
    plan = plan or plan_for(device)
    with _Bench(plan, device) as bench:
        bench.fill()
        rounds = []
        for number in range(plan.rounds + 1):
            progress("restores", number, plan.rounds + 1)
            rounds.append(bench.round(check=number in (0, plan.rounds)))
        progress("restores", plan.rounds + 1, plan.rounds + 1)
    right = rounds[0]["right"] and rounds[-1]["right"]
    return _summed_up(plan, device, rounds[1:], right)  # the first only warms up


def _summed_up(plan: Plan, device: str, rounds: list[Result], right: bool) -> Result:
    size_bytes = plan.num_pages * plan.layout.page_bytes
    # The fastest of each, since what else happens on the machine only ever adds.
    fastest = {name: min(one[name] for one in rounds) for name in ("restore_s", "plain_s")}
    ratios = [one["restore_s"] / one["plain_s"] for one in rounds]
    where = torch.device(device)
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else device,
        "layout": {
            "layers": plan.layout.num_layers,
            "kv_heads": plan.layout.num_kv_heads,
            "head_dim": plan.layout.head_dim,
            "dtype": plan.layout.dtype,
            "page_size": plan.layout.page_size,
        },
        "sessions": plan.sessions,
        "tokens": plan.tokens,
        "pages": plan.num_pages,
        "bytes": size_bytes,
        **fastest,
        "plain_gb_per_s": size_bytes / 1e9 / fastest["plain_s"],
        "first_done_s": statistics.median(one["first_done_s"] for one in rounds),
        "start_s": statistics.median(one["start_s"] for one in rounds),
        "ratio": fastest["restore_s"] / fastest["plain_s"],
        "ratio_of_pairs": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "target": TARGET,
        "right": right,
        "ok": right,
        "samples": rounds,
    }


class _Bench:
    def __init__(self, plan: Plan, device: str) -> None:
        self._plan = plan
        self._where = torch.device(device)
        layout, count = plan.layout, plan.num_pages
        config = WorkerConfig(
            0, 1, _WEIGHTS, [ComponentConfig(layout, count, count)], device=device
        )
        self._worker = build_worker(config)
        self._workers = LocalWorkers([self._worker])
        self._pools: ComponentPools = self._worker.components[layout.component]
        prefetch = PrefetchConfig(threshold_tokens=1)  # there is no store
        self._manager = CacheManager(
            CacheConfig(layout.page_size, count, count, prefetch=prefetch), clock=time.monotonic
        )
        namespace = Namespace(_WEIGHTS, layout.dtype, layout.page_size)
        chance = np.random.default_rng(0)
        self._keys = [
            PrefixKey(namespace, chance.integers(0, 1 << 30, plan.tokens, dtype=np.int32))
            for _ in range(plan.sessions)
        ]

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def fill(self) -> None:
        """Every session is computed, as it were, and copied to the host."""
        for layer in range(self._plan.layout.num_layers):
            for plane in self._pools.device.words(layer):
                plane.random_()
        self._synchronize()
        for number, key in enumerate(self._keys):
            manager = self._manager
            with manager.acquire(manager.match(key), RequestId(f"fill-{number}")) as lease:
                if not manager.extend(lease, self._plan.pages_each):
                    raise AssertionError("the device has room for all sessions")
                manager.commit(lease, key)
        self._until(lambda: self._manager.idle)
        self._manager.flush(DEVICE)

    def round(self, *, check: bool) -> Result:
        """`check`: compare every byte, which takes longer than all the rest."""
        leases = self._acquire()
        host = [self._host_pages(lease) for lease in leases]
        self._synchronize()
        began = time.perf_counter()
        for lease in leases:
            self._manager.load(lease)
        self._step()
        started_s = time.perf_counter() - began
        first_done_s = 0.0

        def done() -> bool:
            nonlocal first_done_s
            left = sum(lease.load_state is LoadState.LOADING for lease in leases)
            if not first_done_s and left < len(leases):
                first_done_s = time.perf_counter() - began
            return not left

        self._until(done)
        restore_s = time.perf_counter() - began
        device = [PageIds(lease.pages) for lease in leases]
        arrived = all(lease.load_state is LoadState.IDLE for lease in leases)
        right = arrived and (
            not check or self._same(PageIds(b"".join(host)), PageIds(b"".join(device)))
        )
        for lease in leases:
            self._manager.release(lease)
        self._until(lambda: self._manager.idle)
        self._manager.flush(DEVICE)
        plain_s = self._plain(PageIds(b"".join(host)), PageIds(b"".join(device)))
        return {
            "restore_s": restore_s,
            "plain_s": plain_s,
            "first_done_s": first_done_s,
            "start_s": started_s,
            "right": right,
        }

    def _acquire(self) -> list[Lease]:
        leases = []
        for number, key in enumerate(self._keys):
            lease = self._manager.acquire(self._manager.match(key), RequestId(f"restore-{number}"))
            if lease.num_host != self._plan.pages_each:
                raise AssertionError("every session is on the host, whole")
            leases.append(lease)
        return leases

    def _host_pages(self, lease: Lease) -> PageIds:
        holdings = [node.held[1] for node in inspect(self._manager).tree.path(lease.tail)]
        return PageIds(b"".join(h.pages for h in reversed(holdings) if h is not None))

    def _plain(self, host: PageIds, device: PageIds) -> float:
        """Nobody else uses these pages now."""
        assert num_pages(host) == self._plan.num_pages
        self._synchronize()
        began = time.perf_counter()
        self._pools.engine.load(host, device).wait()
        self._synchronize()
        return time.perf_counter() - began

    def _same(self, host: PageIds, device: PageIds) -> bool:
        self._synchronize()
        rows_host = torch.from_numpy(page_array(host).astype(np.int64))
        rows_device = torch.from_numpy(page_array(device).astype(np.int64)).to(self._where)
        layers = range(self._plan.layout.num_layers)
        return all(
            torch.equal(theirs[rows_device].cpu(), ours[rows_host])
            for layer in layers
            for ours, theirs in zip(
                self._pools.host.words(layer), self._pools.device.words(layer), strict=True
            )
        )

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not done():
            if time.monotonic() > deadline:
                raise EngineError(f"pages still move after {_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
            self._step()

    def _step(self) -> None:
        self._workers.submit(self._manager.step(self._workers.poll()))

    def _synchronize(self) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)
