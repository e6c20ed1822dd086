"""WorkerGroup: the leader's view of its 1..N ranks, and the group that lives in its own process.

Every command goes to every rank; every rank reports by itself. What the reports add up to (the
minimum over ranks) is the leader's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.messages import Command, Completion

if TYPE_CHECKING:
    import zmq

    from quire.worker.worker import CacheWorker


class WorkerGroup(Protocol):
    """Used by one thread, the step's."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def peer_addresses(self) -> list[str]:
        """Where each rank's page server listens, by rank; empty strings where there is none."""

    def peer_counters(self) -> dict[str, int]:
        """Pages and bytes exchanged with peers, summed over the ranks, as last heard of."""

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        """What becomes readable when poll() has something to say; for whoever sleeps. Copies
        between device and host are not told of."""

    def submit(self, commands: list[Command]) -> None:
        """Give the commands to every living rank, in order. Never blocks."""

    def poll(self) -> list[Completion]:
        """What has been reported since the last call, each rank's in its own order. Never blocks.

        A rank that died is reported once, by `WorkerLost`, after its last completion.
        """

    def close(self) -> None:
        """Stop all ranks. Operations under way are not reported any more."""


class LocalWorkers:
    """All ranks in this process."""

    def __init__(self, workers: Sequence[CacheWorker]) -> None:
        self.workers = tuple(workers)

    @property
    def num_ranks(self) -> int:
        return len(self.workers)

    @property
    def peer_addresses(self) -> list[str]:
        return [worker.peer_address for worker in self.workers]

    def peer_counters(self) -> dict[str, int]:
        return total(worker.peer_counters() for worker in self.workers)

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        return [worker.fileno() for worker in self.workers]

    def submit(self, commands: list[Command]) -> None:
        for worker in self.workers:
            worker.submit(commands)

    def poll(self) -> list[Completion]:
        return [completion for worker in self.workers for completion in worker.poll()]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def total(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counters:
        added.update(one)
    return dict(added)
