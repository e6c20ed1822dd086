"""CopyTracker: the backups and loads of a worker that are under way, and how they ended.

Knows copy engines; no I/O. Used by one thread, the step's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import WorkerError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.messages import Backup, Load
from quire.transfer.base import Copy, CopyEngine, CopyState
from quire.types import OperationId, PageIds, PageStatus
from quire.worker.tasks import Reporter

_REMEMBERED_FAILURES = 1024

TaskKey = tuple[OperationId, str]
"""An operation may cover several components; each has its own reports."""


@dataclass(frozen=True, slots=True)
class ComponentPools:
    """One component's memory on this rank."""

    device: DevicePool
    host: HostPool
    engine: CopyEngine

    def close(self) -> None:
        self.engine.close()
        self.host.close()


@dataclass(frozen=True, slots=True)
class RunningCopy:
    """Its state is the copy's."""

    command: Backup | Load
    copy: Copy


class CopyTracker:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._running: dict[TaskKey, RunningCopy] = {}
        self._failed: deque[tuple[TaskKey, str]] = deque(maxlen=_REMEMBERED_FAILURES)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: TaskKey) -> bool:
        return key in self._running

    def back_up(self, command: Backup, pools: ComponentPools) -> None:
        copy = pools.engine.backup(command.device, command.host)
        self._running[command.op, command.component] = RunningCopy(command, copy)

    def load(self, commands: Sequence[Load], pools: ComponentPools) -> None:
        """Loads of one component that came together are one copy: many requests that restore at
        once cost as much as one, and their first layers all arrive first."""
        host = PageIds(b"".join(command.host for command in commands))
        device = PageIds(b"".join(command.device for command in commands))
        copy = pools.engine.load(host, device)
        for command in commands:
            self._running[command.op, command.component] = RunningCopy(command, copy)

    def poll(self) -> None:
        """Report the copies that have ended since the last call."""
        for key, running in list(self._running.items()):
            state = running.copy.state
            if state is CopyState.RUNNING:
                continue
            del self._running[key]
            if state is CopyState.FAILED:
                self._failed.append((key, running.copy.error))
            status = PageStatus.OK if state is CopyState.DONE else PageStatus.FAILED
            self._reporter.finish(running.command, status, running.copy.seconds)

    def wait_layer(self, key: TaskKey, layer: int) -> None:
        """See Copy.wait_layer; a copy that has ended well needs no waiting."""
        running = self._running.get(key)
        if running is not None:
            running.copy.wait_layer(layer)
            return
        for failed, reason in self._failed:
            if failed == key:
                raise WorkerError(f"load {key[0]} of '{key[1]}' failed: {reason}")
