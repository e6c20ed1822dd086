"""LocalExecutor: the only rank, in the engine's own process."""

from __future__ import annotations

from quire.engine.batch import Batch, BatchResult
from quire.engine.executor.rank import Rank
from quire.engine.selfcheck import check_resume
from quire.worker import LocalWorkers


class LocalExecutor:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.workers = LocalWorkers([rank.worker])

    def run(self, batch: Batch) -> BatchResult:
        return self._rank.runner.run(batch)

    def self_check(self) -> str:
        return check_resume(self._rank)

    def store_counters(self) -> dict[str, int]:
        return self._rank.worker.store_counters()

    def close(self) -> None:
        self._rank.close()
