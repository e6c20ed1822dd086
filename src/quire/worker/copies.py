"""CopyTracker: the backups and loads of a worker that are under way, and how they ended.

Knows copy engines; no I/O. Used by one thread, the step's. Loads are begun at once, those too small
to be worth a copy of their own with others that came with them. A backup that is so small waits, a
few steps at most, for others to go with: nothing changes the pages it is to copy before it has been
reported.

    back_up ──▶ waiting ──enough pages, or long enough──▶ running ──▶ reported
    load ───────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.errors import WorkerError
from quire.memory.device import DevicePool
from quire.memory.host import HostPool
from quire.messages import Backup, Load
from quire.transfer.base import Copy, CopyEngine, CopyState
from quire.types import OperationId, PageIds, PageStatus, num_pages
from quire.worker.tasks import Reporter

_REMEMBERED_FAILURES = 1024
_BACKUP_WAIT_S = 0.01
"""At the first poll after so long a backup is begun, however small."""

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


@dataclass(slots=True)
class WaitingBackups:
    """Of one component."""

    pools: ComponentPools
    since_s: float
    commands: list[Backup] = field(default_factory=list)
    num_pages: int = 0

    def add(self, command: Backup) -> None:
        self.commands.append(command)
        self.num_pages += num_pages(command.host)

    def is_due(self, now_s: float) -> bool:
        enough = self.num_pages >= self.pools.engine.backup_pages
        return enough or now_s >= self.since_s + _BACKUP_WAIT_S


class CopyTracker:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._waiting: dict[str, WaitingBackups] = {}
        """By component."""
        self._running: dict[TaskKey, RunningCopy] = {}
        self._failed: deque[tuple[TaskKey, str]] = deque(maxlen=_REMEMBERED_FAILURES)

    def __len__(self) -> int:
        return len(self._running) + sum(len(one.commands) for one in self._waiting.values())

    def __contains__(self, key: TaskKey) -> bool:
        op, component = key
        waiting = self._waiting.get(component)
        return key in self._running or (
            waiting is not None and any(command.op == op for command in waiting.commands)
        )

    def back_up(self, command: Backup, pools: ComponentPools) -> None:
        now = self._reporter.clock()
        waiting = self._waiting.setdefault(command.component, WaitingBackups(pools, now))
        waiting.add(command)
        if waiting.is_due(now):
            self._begin_backups(command.component)

    def load(self, commands: Sequence[Load], pools: ComponentPools) -> None:
        """Loads of one component as one copy: many small ones cost as much as one, and their first
        layers all arrive first."""
        host = PageIds(b"".join(command.host for command in commands))
        device = PageIds(b"".join(command.device for command in commands))
        copy = pools.engine.load(host, device)
        for command in commands:
            self._running[command.op, command.component] = RunningCopy(command, copy)

    def poll(self) -> None:
        """Report the copies that have ended since the last call; begin backups that have waited."""
        now = self._reporter.clock() if self._waiting else 0.0
        for component, waiting in list(self._waiting.items()):
            if waiting.is_due(now):
                self._begin_backups(component)
        for key, running in list(self._running.items()):
            state = running.copy.state
            if state is CopyState.RUNNING:
                continue
            del self._running[key]
            if state is CopyState.FAILED:
                self._failed.append((key, running.copy.error))
            status = PageStatus.OK if state is CopyState.DONE else PageStatus.FAILED
            self._reporter.finish(running.command, status, running.copy.seconds)

    def _begin_backups(self, component: str) -> None:
        """All that wait, as one copy. If it cannot be begun, they fail."""
        waiting = self._waiting.pop(component)
        device = PageIds(b"".join(command.device for command in waiting.commands))
        host = PageIds(b"".join(command.host for command in waiting.commands))
        try:
            copy = waiting.pools.engine.backup(device, host)
        except Exception as error:  # request boundary: these backups fail
            self._reporter.count_error(error)
            for command in waiting.commands:
                self._reporter.finish(command, PageStatus.FAILED)
            return
        for command in waiting.commands:
            self._running[command.op, component] = RunningCopy(command, copy)

    def wait_layer(self, key: TaskKey, layer: int) -> None:
        """See Copy.wait_layer; a copy that has ended well needs no waiting."""
        running = self._running.get(key)
        if running is not None:
            running.copy.wait_layer(layer)
            return
        for failed, reason in self._failed:
            if failed == key:
                raise WorkerError(f"load {key[0]} of '{key[1]}' failed: {reason}")


def together(loads: Sequence[Load], enough_pages: int) -> Iterator[list[Load]]:
    """Loads that came together, in their order, cut up where there are enough pages for a copy: who
    comes first does not wait for all the others."""
    some: list[Load] = []
    room = enough_pages
    for load in loads:
        some.append(load)
        room -= num_pages(load.host)
        if room <= 0:
            yield some
            some, room = [], enough_pages
    if some:
        yield some
