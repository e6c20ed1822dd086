"""Rig: a manager over simulated workers, driven by hand, for scripted scenarios.

Requests are plain method calls; every use of a page is compared with the oracle, in every
component of the mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from quire.config import PrefetchConfig, PrefetchPolicy, WriteConfig
from quire.keys import Namespace, PrefixKey, UnitKind
from quire.manager import CacheManager, Lease, LoadState
from quire.messages import Command
from quire.sim import ComponentMix, SimOptions
from quire.sim.audit import audit
from quire.sim.clock import VirtualClock
from quire.sim.compute import Compute
from quire.sim.content import Oracle, Pools
from quire.sim.faults import Faults
from quire.sim.latency import Latency
from quire.sim.store import SimStores
from quire.sim.workers import SimWorkers
from quire.types import RequestId, Tier
from sim.scripted_faults import NoFaults

PAGE = 2
WINDOW_PAGES = 2
KEPT_PAGES = WINDOW_PAGES + 1
"""Pages of a window that are kept where a request came to rest."""
FULL, WINDOW, RECURRENT, BOTH = ComponentMix
with_each_mix = pytest.mark.parametrize("mix", ComponentMix, ids=lambda mix: mix.value)


class Rig:
    def __init__(
        self,
        *,
        mix: ComponentMix = FULL,
        ranks: int = 1,
        device_pages: int = 16,
        host_pages: int = 16,
        faults: Faults | None = None,
        rank_factors: Sequence[float] | None = None,
        unit: UnitKind = UnitKind.TOKEN,
        write: WriteConfig | None = None,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        seed: int = 0,
    ) -> None:
        self.clock = VirtualClock()
        self.namespace = Namespace("model", "float32", PAGE, unit)
        options = SimOptions(
            ranks=ranks,
            mix=mix,
            page_size=PAGE,
            device_pages=device_pages,
            host_pages=host_pages,
            window_pages=WINDOW_PAGES,
            device_windows=device_pages,
            host_windows=host_pages,
        )
        config = replace(
            options.cache_config(),
            write=write or WriteConfig(timeout_s=1.0),
            prefetch=PrefetchConfig(
                policy=prefetch, threshold_tokens=PAGE, max_timeout_s=2.0, cost_model=False
            ),
        )
        self.manager = CacheManager(config, clock=self.clock, components=options.components())
        self.pools = Pools(ranks, options.pool_sizes())
        self.oracle = Oracle()
        self.oracle.register(self.namespace)
        self.stores = SimStores()
        self.workers = SimWorkers(
            self.pools,
            self.stores,
            clock=self.clock,
            faults=faults or NoFaults(),
            latency=Latency(Random(seed), rank_factors or [1.0] * ranks),
            rng=Random(seed + 1),
            batch_pages=2,
        )
        self._compute = Compute(self.manager, self.pools, self.workers, WINDOW_PAGES)
        self.sent: list[Command] = []
        self._num_requests = 0

    # ---- time -----------------------------------------------------------------------------------

    def step(self) -> list[Command]:
        """Exchange messages once, without letting time pass."""
        commands, _ = self._exchange()
        self._check()
        return commands

    def _exchange(self) -> tuple[list[Command], bool]:
        """What is sent, and whether anything was said at all."""
        reports = self.workers.poll()
        commands = self.manager.step(reports)
        self.sent += commands
        self.workers.submit(commands)
        return commands, bool(reports or commands)

    def _check(self) -> None:
        self.manager.check_invariants()
        audit(self.manager, self.oracle, self.pools, self.workers.alive)

    def settle(self, limit: int = 2_000) -> None:
        """Until nothing is in flight and nothing is waiting for its time. Steps in which nobody
        says anything are not looked at, but for the last."""
        for _ in range(limit):
            if self._exchange()[1]:
                self._check()
            times = [self.workers.next_event_s(), self.manager.next_wakeup()]
            pending = [t for t in times if t is not None]
            if not pending and self.manager.idle:
                self._check()
                return
            if pending:
                self.clock.advance_to(min(pending))
        running = [str(op.kind) for op in self.manager.operations.running.values()]
        raise AssertionError(f"it never came to rest: {running}, {pending}")

    def attach(self, url: str = "sim://one") -> None:
        self.manager.store.attach(url)
        self.settle()

    # ---- requests -------------------------------------------------------------------------------

    def key(self, tokens: Sequence[int]) -> PrefixKey:
        return PrefixKey(self.namespace, list(tokens))

    def acquire(self, tokens: Sequence[int]) -> Lease:
        self._num_requests += 1
        key = self.key(tokens)
        owner = RequestId(f"r{self._num_requests}")
        return self.manager.acquire(self.manager.match(key), owner)

    def begin(self, tokens: Sequence[int]) -> Lease:
        """Acquire, prefetch, admit and load, waiting for each."""
        lease = self.acquire(tokens)
        self.manager.prefetch(lease)
        self.settle()
        assert self.manager.ready(lease)
        self.manager.admit(lease)
        self.manager.load(lease)
        self.settle()
        return lease

    def compute(self, lease: Lease) -> int:
        """Compute and commit all that is missing of the lease's key; returns pages computed."""
        key, expected = lease.key, self.expected(lease)
        first, last = lease.num_device, lease.key.last
        assert self._compute.begin(lease)
        assert self._compute.extend(lease, last - first)
        at = first
        while at < last:
            stop = self.manager.next_stop(lease, at, last)
            assert self._compute.cover(lease, stop)
            self._compute.run(lease, expected, at, stop, save=True)
            self.manager.commit(lease, key if stop == last else key[:stop])
            at = stop
        return last - first

    def serve(self, tokens: Sequence[int]) -> int:
        """A whole request; returns the pages that had to be computed."""
        lease = self.begin(tokens)
        if lease.load_state is LoadState.FAILED:
            self.manager.release(lease)
            lease = self.acquire(tokens)  # start over, without loading
        self.check(lease)
        computed = self.compute(lease)
        self.check(lease)
        self.manager.release(lease)
        self.settle()
        return computed

    def expected(self, lease: Lease) -> list[int]:
        raw = np.frombuffer(lease.key.data, dtype="<i4").tobytes()
        return self.oracle.pages(self.namespace, raw)

    def check(self, lease: Lease) -> None:
        """All that the lease holds is what it must be, on every rank that is there."""
        self._compute.check(lease, self.expected(lease), lease.num_device)

    def flush(self, *tiers: Tier) -> None:
        for tier in tiers:
            self.manager.flush(tier)

    # ---- at the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Nothing is left: no lease, no operation, no page outside the free lists."""
        self.settle()
        assert not self.manager.leases
        self.flush(Tier.DEVICE, Tier.HOST)
        self.manager.check_invariants()
        for slot, allocator in enumerate(self.manager._core.allocators):
            assert allocator.num_free == allocator.num_pages, f"pages of slot {slot} are missing"
        assert not self.manager._core.tree.roots
