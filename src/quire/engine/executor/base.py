"""Executor: the ranks of one engine, each with its share of the model and of the pages."""

from __future__ import annotations

from typing import Protocol

from quire.engine.batch import Batch, BatchResult
from quire.errors import EngineError
from quire.worker import WorkerGroup


class RankLost(EngineError):
    """A rank is gone, and with it its share of the model: the engine cannot go on."""


class Executor(Protocol):
    """Used by one thread, the step's."""

    @property
    def workers(self) -> WorkerGroup:
        """The cache's hands, one per rank."""

    def run(self, batch: Batch) -> BatchResult:
        """Compute a batch on all ranks; returns when it is done.

        Commands submitted to the workers before are begun before. Raises RankLost when a rank is
        gone; anything else concerns this batch only.
        """

    def self_check(self) -> str:
        """Does the model go on from saved state as if it had not stopped? Empty, or why not. For
        use before the first batch."""

    def store_counters(self) -> dict[str, int]:
        """What the store clients of the ranks in this process have counted."""

    def close(self) -> None: ...
