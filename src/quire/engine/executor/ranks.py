"""RankExecutor: a process per rank; this one only leads.

Batches go to the ranks over the same ordered line as the cache's commands, so a batch that waits
for a load never arrives before it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from quire.engine.batch import Batch, BatchResult, SegmentResult, decode_result, encode
from quire.engine.executor.base import RankLost
from quire.engine.executor.rank import RankConfig
from quire.engine.startup import model_environment
from quire.messages import Command, Completion, WorkerLost
from quire.store.account import StoreAccount
from quire.worker import WorkerConfig
from quire.worker.remote import Liveness, Program, RemoteWorkers

_BATCH_TIMEOUT_S = 600.0
_POLL_MS = 20
_LIVENESS = Liveness(start_timeout_s=900.0, silence_s=_BATCH_TIMEOUT_S)
"""A rank that computes does not speak."""


class RankExecutor:
    def __init__(self, config: RankConfig, worker_configs: Sequence[WorkerConfig]) -> None:
        """Starts all ranks and waits for them. Raises WorkerError."""
        folder = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        config = msgspec.structs.replace(config, rendezvous=str(folder / "meet"))
        program = Program(
            module="quire.engine.executor.rank_process",
            extra=msgspec.msgpack.encode(config),
            # All ranks are on this machine; gloo would otherwise look up its host name.
            environment={**model_environment(), "GLOO_SOCKET_IFNAME": "lo"},
        )
        try:
            self._ranks = RemoteWorkers(worker_configs, liveness=_LIVENESS, program=program)
        finally:  # they have met, or never will
            shutil.rmtree(folder, ignore_errors=True)
        self._early: list[Completion] = []
        self._launched: deque[Batch] = deque()

    @property
    def workers(self) -> RankExecutor:
        """Itself: while it waits for a batch it also hears what the workers report."""
        return self

    @property
    def num_ranks(self) -> int:
        return self._ranks.num_ranks

    @property
    def peer_addresses(self) -> list[str]:
        return self._ranks.peer_addresses

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        return self._ranks.news

    def peer_counters(self) -> dict[str, int]:
        return self._ranks.peer_counters()

    def submit(self, commands: list[Command]) -> None:
        self._ranks.submit(commands)

    def poll(self) -> list[Completion]:
        early, self._early = self._early, []
        return early + self._ranks.poll()

    overlaps = False

    def launch(self, batch: Batch) -> None:
        self._ranks.send(encode(batch))
        self._launched.append(batch)

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        batch = self._launched.popleft()
        results: dict[int, BatchResult] = {}
        deadline = time.monotonic() + _BATCH_TIMEOUT_S
        while len(results) < self._ranks.num_ranks:
            for rank, data in self._ranks.take_parcels(_POLL_MS):
                result = decode_result(data)
                if result.number == batch.number:  # else: of a batch that was given up
                    results[rank] = result
            completions = self._ranks.poll()
            self._early += completions
            for lost in completions:
                if isinstance(lost, WorkerLost):
                    raise RankLost(lost.reason)
            if completions:
                meanwhile()
            if time.monotonic() > deadline:
                raise RankLost(f"no result from all ranks within {_BATCH_TIMEOUT_S:g} s")
        return _merge(batch, results)

    def self_check(self) -> str:
        """The ranks have checked themselves, together, before they said that they are ready."""
        return ""

    def store_account(self) -> StoreAccount:
        return self._ranks.store_account()

    def close(self) -> None:
        self._ranks.close()


def _merge(batch: Batch, results: dict[int, BatchResult]) -> BatchResult:
    """Rank 0 samples; a segment that failed anywhere has failed."""
    merged: list[SegmentResult] = []
    for i, result in enumerate(results[0].results):
        failures = [r.results[i].failed for r in results.values() if r.results[i].failed]
        merged.append(SegmentResult(failed=failures[0]) if failures else result)
    return BatchResult(batch.number, merged)
