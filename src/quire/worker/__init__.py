"""Workers: what executes the leader's commands, one per rank. `open_workers` picks where they run.

Importing this needs no torch, so a leader whose workers are other processes stays light.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.worker.config import (
    ComponentConfig,
    IoLimits,
    PeerServing,
    WorkerConfig,
    build_worker,
)
from quire.worker.group import LocalWorkers, WorkerGroup

__all__ = [
    "ComponentConfig",
    "IoLimits",
    "LocalWorkers",
    "PeerServing",
    "WorkerConfig",
    "WorkerGroup",
    "build_worker",
    "open_workers",
]


def open_workers(configs: Sequence[WorkerConfig], *, processes: bool = False) -> WorkerGroup:
    """One worker per config: in this process, or each in its own.

    Raises ConfigError, MemoryBudgetError, WorkerError; nothing is left behind then.
    """
    if processes:
        from quire.worker.remote import RemoteWorkers

        return RemoteWorkers(configs)
    workers = []
    try:
        for config in configs:
            workers.append(build_worker(config))
    except BaseException:
        LocalWorkers(workers).close()
        raise
    return LocalWorkers(workers)
