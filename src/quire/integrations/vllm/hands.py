"""Hands: a worker's side. A CacheWorker over vLLM's own KV tensors, and what vLLM is told of it.

Does what its orders say, in the order of the steps, and never waits while the model has something
to compute. In a step without computation it sleeps until there is news, for a moment: vLLM asks
again at once, and an interpreter that is busy asking keeps the threads that move bytes from moving
them. Knows operations, requests' names and blocks; neither vLLM nor why.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from quire.errors import ConfigError
from quire.integrations.vllm.orders import Orders, Setup, pack_reports, unpack_orders
from quire.integrations.vllm.tensors import KvTensors
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.messages import Backup, Completion, Load, Transferred
from quire.store import open_pages
from quire.transfer import open_copy_engine
from quire.types import OperationId, page_array
from quire.worker.worker import CacheWorker, ComponentPools

IDLE_WAIT_S = 0.005
"""The longest that a step without computation waits for news."""
NAP_S = 0.0002
"""Copies have to be asked."""


@dataclass(frozen=True, slots=True)
class _Load:
    request: str
    blocks: list[int]


class Hands:
    def __init__(
        self,
        rank: int,
        num_ranks: int,
        tensors: KvTensors,
        host_pages: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the host's memory now."""
        self._rank, self._num_ranks, self._clock = rank, num_ranks, clock
        self._tensors = tensors
        device = DevicePool(tensors.layout, tensors.planes)
        on_cuda = device.device.type == "cuda"
        host = HostPool(tensors.layout, host_pages, pin_for=device.device if on_cuda else None)
        try:
            engine = open_copy_engine(device, host)
        except BaseException:
            host.close()
            raise
        self.pools = ComponentPools(device, host, engine)
        self._worker: CacheWorker | None = None
        self._loads: dict[OperationId, _Load] = {}
        self._copying: set[OperationId] = set()
        """Blocks are read or written by these."""
        self._sending: dict[str, set[OperationId]] = {}
        self._reports: list[Completion] = []
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()

    def obey(self, orders: Orders) -> None:
        """Begin what the orders of a step say."""
        worker = self._worker or self._start(orders.setup)
        commands = unpack_orders(orders.commands)
        for command in commands:
            if isinstance(command, Load | Backup):
                self._copying.add(command.op)
            if isinstance(command, Load):
                blocks = page_array(command.device).tolist()
                self._loads[command.op] = _Load(orders.loads[command.op], blocks)
        for request, blocks in orders.refused.items():
            self._received.add(request)
            self._bad_blocks.update(blocks)
        for request, ops in orders.sending.items():
            self._sending[request] = set(ops)
        if commands:
            worker.submit(commands)

    def look(self, *, idle: bool) -> None:
        """Take in what has happened; with nothing to compute, wait a moment for it."""
        worker = self._worker
        if worker is None:
            return
        self._take(worker.poll())
        if not idle or self._reports or not worker.busy:
            return
        until = self._clock() + IDLE_WAIT_S
        while not self._reports and self._clock() < until:
            select.select([worker], [], [], NAP_S if worker.is_copying else IDLE_WAIT_S)
            self._take(worker.poll())

    def finish_copies(self) -> None:
        """Wait until no block is read or written any more: somebody else is to have them."""
        worker = self._worker
        while worker is not None and self._copying:
            self._take(worker.poll())
            if self._copying:
                time.sleep(NAP_S)

    def take_sent(self) -> set[str]:
        """Requests whose blocks are not needed any more."""
        sent = {name for name, ops in self._sending.items() if not ops & self._copying}
        for name in sent:
            del self._sending[name]
        return sent

    def take_received(self) -> set[str]:
        """Requests whose loads have ended, well or not."""
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_reports(self) -> bytes:
        """For the leader; empty: nothing."""
        reports, self._reports = self._reports, []
        return pack_reports(reports) if reports else b""

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        else:
            self.pools.close()

    def _start(self, setup: Setup) -> CacheWorker:
        mine = Setup(
            setup.model_fingerprint, self.pools.host.num_pages, self._tensors.layout.page_size
        )
        if mine != setup:
            raise ConfigError(
                f"rank {self._rank} has {mine.host_pages} host pages of {mine.page_size} tokens, "
                f"its leader counts on {setup.host_pages} of {setup.page_size}"
            )
        self._worker = CacheWorker(
            self._rank,
            self._num_ranks,
            {"full": self.pools},
            model_fingerprint=self._tensors.fingerprint(setup.model_fingerprint),
            open_store=lambda url: open_pages(url, clock=self._clock),
            clock=self._clock,
        )
        return self._worker

    def _take(self, completions: list[Completion]) -> None:
        self._reports += completions
        for report in completions:
            if not isinstance(report, Transferred) or report.op not in self._copying:
                continue
            load = self._loads.get(report.op)
            if load is not None:
                pairs = zip(load.blocks[report.first :], report.statuses, strict=False)
                self._bad_blocks.update(block for block, status in pairs if status)
            if report.final:
                self._copying.discard(report.op)
                if load is not None:
                    self._received.add(load.request)
                    del self._loads[report.op]


def by_name(tensors: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
    """The layers' tensors in the model's order. Raises ConfigError if one is missing."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ConfigError(f"vLLM gave no KV cache for {', '.join(missing[:3])}")
    return {name: tensors[name] for name in names}
