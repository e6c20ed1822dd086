"""CacheWorker: one rank's hands. Takes commands, moves bytes, reports page by page.

Knows its pools, its copies, its lanes of I/O threads and the attached store. Decides nothing:
which pages, when and why is the leader's business.

    Backup, Load          → copy engine   asked for news in poll()
    Probe | Fetch | Write → a lane each   so that a probe never waits behind a queue of writes
    Fetch from a peer     → a lane each   so that a slow peer holds up neither store nor others
    Touch, Disown         → a short lane  dropped when that is full
    Serve                 → page server   until it is cancelled
    Attach, Detach, Clear → Attachment    in the order given
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from quire.memory.host import HostPool
from quire.messages import (
    AttachStore,
    Backup,
    Cancel,
    ClearStore,
    Command,
    Completion,
    DetachStore,
    Disown,
    Fetch,
    Load,
    PeerSource,
    Probe,
    Probed,
    Serve,
    StoreChanged,
    Touch,
    Transferred,
    Write,
)
from quire.store.account import StoreAccount
from quire.store.base import Pages, Part
from quire.store.counters import StoreCounters
from quire.types import Clock, OperationId, PageStatus
from quire.worker.attachment import Attachment
from quire.worker.bell import Bell
from quire.worker.checks import PageCommand, makes_sense
from quire.worker.config import IoLimits, PeerServing
from quire.worker.copies import ComponentPools, CopyTracker, TaskKey, together
from quire.worker.fan import Fan
from quire.worker.lanes import Lane
from quire.worker.peering import Peering, PeerTask, ServeTask
from quire.worker.store_tasks import (
    ProbeTask,
    StoreTask,
    disown_task,
    nothing_of,
    probed,
    touch_task,
)
from quire.worker.tasks import IoTask, Reporter

__all__ = ["CacheWorker", "ComponentPools"]


class CacheWorker:
    """submit, poll, wait_layer and close are for one thread, the step's."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        components: Mapping[str, ComponentPools],
        *,
        model_fingerprint: str,
        open_store: Callable[[str], Pages],
        limits: IoLimits | None = None,
        peer: PeerServing | None = None,
        clock: Clock = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Owns the pools: close() closes them. Raises ConfigError when its page server cannot
        listen where it should."""
        self.rank = rank
        self.components = dict(components)
        self._parts = {
            name: Part(
                component=name,
                shard=rank,
                num_shards=num_ranks,
                fingerprint=pools.host.layout.fingerprint(model_fingerprint),
                page_bytes=pools.host.layout.page_stride_bytes,
            )
            for name, pools in components.items()
        }
        self._limits = limits = limits or IoLimits()
        self._clock = clock
        self._wall_ns = wall_ns
        self._counters = StoreCounters()
        self._done: deque[Completion] = deque()
        self._bell = Bell()
        self._reporter = Reporter(rank, clock, self._report, self._counters.error)
        self._copies = CopyTracker(self._reporter)
        self._loads: dict[TaskKey, Load] = {}
        """Submitted and not begun: they are begun together."""
        self._tasks: dict[TaskKey, IoTask | ServeTask] = {}
        self._serving: dict[TaskKey, ServeTask] = {}
        """Not cancelled yet; then they are tasks that will end."""
        hosts = {name: pools.host for name, pools in components.items()}
        self._peering = Peering(peer, hosts, self._counters.error) if peer is not None else None
        self._num_changes = 0
        self._probes = Lane("probe", limits.probe_threads, limits.max_queued)
        self._fetches = Lane("fetch", limits.fetch_threads, limits.max_queued)
        self._writes = Lane("write", limits.write_threads, limits.max_queued)
        self._from_peers = Fan(
            "peer", limits.peer_threads, limits.max_queued, limits.max_peer_lanes
        )
        self._touches = Lane("touch", 1, limits.max_touches)
        self._attachment = Attachment(open_store, self._reporter, limits.max_queued)
        self._closed = False

    @property
    def busy(self) -> bool:
        """Is there anything left to report?"""
        return bool(len(self._copies) or self._tasks or self._num_changes or self._done)

    @property
    def is_copying(self) -> bool:
        """Is there anything that only poll() finds out? Of all else `fileno` tells."""
        return bool(len(self._copies) or self._loads)

    def fileno(self) -> int:
        """Readable when poll() has something to say of what threads did; for whoever sleeps."""
        return self._bell.fileno()

    @property
    def peer_address(self) -> str:
        """Where the page server listens; empty when there is none."""
        return self._peering.server.address if self._peering is not None else ""

    def peer_counters(self) -> dict[str, int]:
        """Pages and bytes exchanged with peers; empty when none are."""
        return self._peering.counters() if self._peering is not None else {}

    def counters(self) -> dict[str, int]:
        """How often something went other than well, by reason."""
        return self._counters.snapshot()

    def store_account(self) -> StoreAccount:
        """How the attached stores stand; empty when there is none."""
        lease = self._attachment.borrow()
        if lease is None:
            return StoreAccount()
        try:
            return StoreAccount(lease.store.counters(), lease.store.health())
        except Exception as error:  # the boundary to a store: it says nothing of itself
            self._counters.error(error)
            return StoreAccount()
        finally:
            lease.release()

    def submit(self, commands: list[Command]) -> None:
        """Start the commands. Never waits for a byte; never raises for what is in a command."""
        for command in commands:
            try:
                self._start(command)
            except Exception as error:  # request boundary: this one command fails
                self._counters.error(error)
                self._refuse(command, PageStatus.FAILED)
        if self._loads:
            self._start_loads()

    def poll(self) -> list[Completion]:
        """What has happened since the last call. Never waits."""
        now = self._clock()
        self._bell.hush()
        for task in self._tasks.values():
            task.expire(now)
        self._copies.poll()
        completions: list[Completion] = []
        while self._done:
            completion = self._done.popleft()
            completions.append(completion)
            if isinstance(completion, StoreChanged):
                self._num_changes -= 1
            elif isinstance(completion, Probed) or (
                isinstance(completion, Transferred) and completion.final
            ):
                self._tasks.pop((completion.op, completion.component), None)
        return completions

    def wait_layer(self, op: OperationId, layer: int, component: str = "full") -> None:
        """The model runner is about to use `layer` of what `op` loads: see Copy.wait_layer.

        An operation already reported as done needs no waiting. Raises WorkerError when the copy
        failed.
        """
        self._copies.wait_layer((op, component), layer)

    def close(self) -> None:
        """End everything: what is queued is reported as cancelled, what runs is finished."""
        if self._closed:
            return
        self._closed = True
        timeout_s = self._limits.close_timeout_s
        for op, _ in list(self._serving):
            self._cancel(op)
        if self._peering is not None:
            self._peering.client.interrupt()
        lanes = (self._probes, self._fetches, self._writes, self._touches)
        ended = [lane.close(timeout_s) for lane in (*lanes, self._from_peers)]
        ended.append(self._attachment.close(timeout_s))
        if self._peering is not None:
            ended.append(self._peering.close(timeout_s))
        for pools in self.components.values():
            pools.engine.close()
            # A thread stuck in a store or a peer may still use host pages: leave them pinned.
            if all(ended):
                pools.host.close()

    def _report(self, completion: Completion) -> None:
        self._done.append(completion)
        self._bell.ring()

    # ---- starting -------------------------------------------------------------------------------

    def _start(self, command: Command) -> None:
        if isinstance(command, Cancel):
            self._cancel(command.op)
        elif isinstance(command, AttachStore | DetachStore | ClearStore):
            self._num_changes += 1
            self._attachment.start(command)
        elif not isinstance(command, Touch | Disown) and self._under_way(
            (command.op, command.component)
        ):
            # The same operation twice: the first one's final report is the only one.
            self._counters.count("duplicate_command")
        elif (pools := self.components.get(command.component)) is None or not makes_sense(
            command, pools
        ):
            self._counters.count("malformed_command")
            self._refuse(command, PageStatus.FAILED)
        else:
            self._start_checked(command, pools)

    def _start_checked(self, command: PageCommand, pools: ComponentPools) -> None:
        match command:
            case Backup() | Load() if not command.host:
                self._refuse(command, PageStatus.OK)  # no page, no status: only the final report
            case Backup():
                self._copies.back_up(command, pools)
            case Load():
                self._loads[command.op, command.component] = command
            case Probe():
                self._start_probe(command)
            case Serve():
                self._start_serve(command)
            case Touch() | Disown():
                self._start_word(command)
            case Fetch(source=source) if source is not None:
                self._start_from_peer(command, source)
            case Fetch() | Write():
                self._start_pages(command, pools.host)

    def _start_loads(self) -> None:
        """Those that were submitted together; small ones of a component are one copy."""
        waiting, self._loads = list(self._loads.values()), {}
        for name, pools in self.components.items():
            loads = [load for load in waiting if load.component == name]
            for some in together(loads, pools.engine.load_pages):
                try:
                    self._copies.load(some, pools)
                except Exception as error:  # request boundary: these loads fail
                    self._counters.error(error)
                    for load in some:
                        self._refuse(load, PageStatus.FAILED)

    def _start_pages(self, command: Write | Fetch, host: HostPool) -> None:
        is_fetch = isinstance(command, Fetch)
        lease = self._attachment.borrow() if command.host else None
        if lease is None:
            self._refuse(command, PageStatus.MISS if is_fetch else PageStatus.REJECTED)
            return
        ahead = None
        if isinstance(command, Fetch) and command.after is not None:
            ahead = self._tasks.get((command.after, command.component))
        task = StoreTask(
            command,
            self._reporter,
            part=self._parts[command.component],
            host=host,
            batch_pages=self._limits.batch_pages,
            lease=lease,
            used_ns=self._wall_ns(),
            ahead=ahead if isinstance(ahead, StoreTask) else None,
        )
        self._enqueue(self._fetches if is_fetch else self._writes, command, task)

    def _start_word(self, command: Touch | Disown) -> None:
        """Dropped when there is no store, or more of them than it can keep up with."""
        what = "touch" if isinstance(command, Touch) else "disown"
        lease = self._attachment.borrow()
        if lease is None:
            self._counters.count(f"{what}_dropped")
            return
        part = self._parts[command.component]
        if isinstance(command, Touch):
            used_ns = self._wall_ns()
            task = touch_task(command, self._reporter, part=part, lease=lease, used_ns=used_ns)
        else:
            task = disown_task(command, self._reporter, part=part, lease=lease)
        if not self._touches.submit(task):
            self._counters.count(f"{what}_dropped")
            task.cancel()

    def _start_from_peer(self, command: Fetch, source: PeerSource) -> None:
        if self._peering is None or not command.host:
            self._refuse(command, PageStatus.FAILED)
            return
        region, limits = self._peering.regions[command.component], self._limits
        few = max(1, limits.peer_batch_bytes // region.pool.layout.page_bytes)
        task = PeerTask(
            command,
            self._reporter,
            source,
            region=region,
            client=self._peering.client,
            batch_pages=min(limits.peer_batch_pages, few),
        )
        self._tasks[command.op, command.component] = task
        if not self._from_peers.submit(source.epoch, task):
            self._turn_away(task)

    def _start_serve(self, command: Serve) -> None:
        if self._peering is None:
            self._refuse(command, PageStatus.FAILED)
        else:
            task = ServeTask(command, self._peering.server, self._reporter)
            self._serving[command.op, command.component] = task

    def _start_probe(self, command: Probe) -> None:
        lease = self._attachment.borrow() if any(command.queries) else None
        if lease is None:
            self._refuse(command, PageStatus.MISS)
            return
        part = self._parts[command.component]
        task = ProbeTask(command, self._reporter, part=part, lease=lease)
        self._enqueue(self._probes, command, task)

    def _enqueue(self, lane: Lane, command: Write | Fetch | Probe, task: IoTask) -> None:
        self._tasks[command.op, command.component] = task
        if not lane.submit(task):
            self._turn_away(task)

    def _turn_away(self, task: IoTask) -> None:
        self._counters.count("queue_full")
        task.stop(PageStatus.REJECTED)

    def _cancel(self, op: OperationId) -> None:
        # Copies are left to finish: they take milliseconds, and on a stream nothing can stop them.
        for key in [key for key in self._serving if key[0] == op]:
            self._tasks[key] = self._serving.pop(key)
        for (task_op, _), task in self._tasks.items():
            if task_op == op:
                task.cancel()

    def _under_way(self, key: TaskKey) -> bool:
        known = (self._tasks, self._copies, self._serving, self._loads)
        return any(key in tasks for tasks in known)

    def _refuse(self, command: Command, status: PageStatus) -> None:
        """The one, final report of a command that was not started."""
        match command:
            case Backup() | Load() | Write() | Fetch() | Serve():
                self._reporter.finish(command, status)
            case Probe():
                self._reporter.report(probed(command, self.rank, nothing_of(command)))
