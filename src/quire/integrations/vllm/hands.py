"""Hands: a worker's side. A CacheWorker over vLLM's own KV tensors, and what vLLM is told of it.

Does what its orders say, in the order of the steps, and never waits while the model has something
to compute. In a step without computation it sleeps until there is news, for a moment: vLLM asks
again at once, and an interpreter that is busy asking keeps the threads that move bytes from moving
them. What vLLM is told of it is in its accounts. Knows neither vLLM nor why.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from quire.errors import ConfigError
from quire.integrations.vllm.accounts import Accounts
from quire.integrations.vllm.orders import Orders, Setup
from quire.integrations.vllm.tensors import KvTensors, fingerprint
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.store import open_pages
from quire.transfer import open_copy_engine
from quire.worker.worker import CacheWorker, ComponentPools

IDLE_WAIT_S = 0.005
"""The longest that a step without computation waits for news."""
NAP_S = 0.0002
"""Copies have to be asked."""


class Hands:
    def __init__(
        self,
        rank: int,
        num_ranks: int,
        kinds: Sequence[KvTensors],
        host_pages: Sequence[int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the host's memory now, of each kind of attention so many pages."""
        self._rank, self._num_ranks, self._clock = rank, num_ranks, clock
        self._kinds = kinds
        self.pools: dict[str, ComponentPools] = {}
        """By component."""
        try:
            for tensors, num_pages in zip(kinds, host_pages, strict=True):
                self.pools[tensors.layout.component] = _open_pools(tensors, num_pages)
        except BaseException:
            self._close_pools()
            raise
        self._worker: CacheWorker | None = None
        self.accounts = Accounts()

    def obey(self, orders: Orders) -> None:
        """Begin what the orders of a step say."""
        worker = self._worker or self._start(orders.setup)
        commands = self.accounts.begin(orders)
        if commands:
            worker.submit(commands)

    def look(self, *, idle: bool) -> None:
        """Take in what has happened; with nothing to compute, wait a moment for it."""
        worker = self._worker
        if worker is None:
            return
        accounts = self.accounts
        accounts.take(worker.poll())
        if not idle or accounts.has_news or not worker.busy:
            return
        until = self._clock() + IDLE_WAIT_S
        while not accounts.has_news and self._clock() < until:
            select.select([worker], [], [], NAP_S if worker.is_copying else IDLE_WAIT_S)
            accounts.take(worker.poll())

    def finish_copies(self, orders: Orders) -> None:
        """Before this step: wait until no block is read or written that somebody else has now."""
        worker, accounts = self._worker, self.accounts
        ops = None if orders.preempted else orders.taken
        while worker is not None and accounts.is_copying(ops):
            accounts.take(worker.poll())
            if accounts.is_copying(ops):
                time.sleep(NAP_S)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        else:
            self._close_pools()

    def _close_pools(self) -> None:
        for pools in self.pools.values():
            pools.close()

    def _start(self, setup: Setup) -> CacheWorker:
        mine = Setup(
            setup.model_fingerprint,
            [pools.host.num_pages for pools in self.pools.values()],
            self._kinds[0].layout.page_size,
        )
        if mine != setup:
            raise ConfigError(
                f"rank {self._rank} has {mine.host_pages} host pages of {mine.page_size} tokens, "
                f"its leader counts on {setup.host_pages} of {setup.page_size}"
            )
        self._worker = CacheWorker(
            self._rank,
            self._num_ranks,
            self.pools,
            model_fingerprint=fingerprint(setup.model_fingerprint, self._kinds),
            open_store=lambda url: open_pages(url, clock=self._clock),
            clock=self._clock,
        )
        return self._worker


def _open_pools(tensors: KvTensors, num_pages: int) -> ComponentPools:
    device = DevicePool(tensors.layout, tensors.planes, tensors.parts)
    on_cuda = device.device.type == "cuda"
    host = HostPool(tensors.layout, num_pages, pin_for=device.device if on_cuda else None)
    try:
        return ComponentPools(device, host, open_copy_engine(device, host))
    except BaseException:
        host.close()
        raise


def by_name(tensors: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """The layers' tensors in the model's order. Raises ConfigError if one is missing."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ConfigError(f"vLLM gave no KV cache for {', '.join(missing[:3])}")
    return {name: tensors[name] for name in names}
