"""Executor: the ranks of one engine, each with its share of the model and of the pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quire.engine.batch import Batch, BatchResult
from quire.errors import EngineError
from quire.store.account import StoreAccount
from quire.worker import WorkerGroup


class RankLost(EngineError):
    """A rank is gone, and with it its share of the model: the engine cannot go on."""


class Executor(Protocol):
    """Used by one thread, the step's."""

    @property
    def workers(self) -> WorkerGroup:
        """The cache's hands, one per rank."""

    @property
    def overlaps(self) -> bool:
        """Is it worth launching a batch before the one ahead of it is collected?"""

    def launch(self, batch: Batch) -> None:
        """Begin to compute a batch on all ranks, after those launched before.

        Commands submitted to the workers before are begun before. Raises RankLost when a rank is
        gone, or its device broken; anything else concerns this batch only, which is then not to be
        collected.
        """

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        """Wait for the first batch launched that was not collected; raises as `launch`.

        `meanwhile` is called again and again if that takes long, and raises whatever it will.
        """

    def self_check(self) -> str:
        """Does the model go on from saved state as if it had not stopped? Empty, or why not. For
        use before the first batch."""

    def store_account(self) -> StoreAccount:
        """How the stores stand, over all ranks; of those in other processes, as last heard of."""

    def close(self) -> None: ...
