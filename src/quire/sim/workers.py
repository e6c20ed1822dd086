"""SimWorkers: the workers of all ranks, moving fake bytes in virtual time.

Each command becomes one process per rank, a generator that yields how long it waits. Nothing is
ordered but the reports of one leg: operations overtake each other and ranks drift apart as far as
the latencies drawn let them, so the manager can rely on nothing but messages.py.

A copy is made as treacherous as the contract allows:

    submit ─────────── read ─────────── write ─────────── report
      └ target is garbage from here ──────┘
        source must be right from submit until its read, which may be as late as the report;
        target must not be used from submit until the report

A fetch from a peer reads the peer's host pages in the same way, at a moment of its own, while it
is counted as a reader of the grant (quire.sim.reads).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from inspect import GEN_CLOSED, getgeneratorstate
from random import Random
from typing import Any

from quire.manager.operations import OperationKind
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
    Probe,
    Probed,
    Serve,
    StoreChanged,
    Touch,
    Transferred,
    WorkerLost,
    Write,
)
from quire.sim.bandwidth import SimLane
from quire.sim.clock import VirtualClock
from quire.sim.content import Pools
from quire.sim.faults import Fault, Faults, statuses
from quire.sim.latency import Latency, moments
from quire.sim.peers import Serving, SimPeers
from quire.sim.reads import PeerReads, Process
from quire.sim.store import SimStore, SimStores
from quire.types import OperationId, Owner, PageKey, PageStatus, Tier, page_array, split_keys

_Stored = tuple[PageKey, int, PageKey | None, Owner | None]
"""Key, host page, the key of the page before it, if the store is to know, and whose it is."""

_MAX_LOADS = 256
"""Known before those that have ended are forgotten."""


def _runs(process: Process) -> bool:
    return getgeneratorstate(process) != GEN_CLOSED


@dataclass(slots=True, eq=False)
class _Leg:
    """One rank's part of one command."""

    rank: int
    op: OperationId
    component: str
    deadline_s: float = float("inf")
    cancelled: bool = False


class SimWorkers:
    def __init__(
        self,
        pools: Pools,
        stores: SimStores,
        *,
        clock: VirtualClock,
        faults: Faults,
        latency: Latency,
        rng: Random,
        batch_pages: int = 3,
        lane_pages_s: float = 0.0,
        peers: SimPeers | None = None,
        serving: Serving | None = None,
    ) -> None:
        """`lane_pages_s`: what each rank's lane between device and host carries, and as much that
        to the store; 0: everything at once. `peers`: whom pages are fetched from; `serving`: what
        is served to them."""
        self._pools = pools
        self._stores = stores
        self._clock = clock
        self._faults = faults
        self._latency = latency
        self._rng = rng
        self._batch_pages = batch_pages
        ranks = range(pools.num_ranks)
        self._copy_lanes = [SimLane(clock, lane_pages_s) for _ in ranks]
        self._store_lanes = [SimLane(clock, lane_pages_s) for _ in ranks]
        self._reads = None if peers is None else PeerReads(
            pools, peers, clock=clock, faults=faults, latency=latency, rng=rng,
            batch_pages=batch_pages, run=self._resume, report=self._report_read,
        )  # fmt: skip
        self._serving = serving
        self._attached: list[SimStore | None] = [None] * pools.num_ranks
        self._legs: dict[tuple[int, OperationId, str], _Leg] = {}
        """Legs under way that look for a cancellation between two batches."""
        self._agenda: list[tuple[float, int, int, Process]] = []
        """(when, sequence, rank, process): ties run in the order they were made."""
        self._sequence = 0
        self._reports: list[Completion] = []
        self._loads: dict[OperationId, list[Process]] = {}
        self._failed_loads: set[OperationId] = set()
        self.alive = list(range(pools.num_ranks))

    def submit(self, commands: list[Command]) -> None:
        """Hand every command to every rank that is still there."""
        for command in commands:
            for rank in self.alive:
                assert not isinstance(command, Disown), "nobody audits here"
                if isinstance(command, Touch):
                    self._touch(rank, command)
                    continue
                if isinstance(command, Cancel):
                    self._cancel(rank, command.op)
                    continue
                if isinstance(command, Fetch) and command.source is not None:
                    assert self._reads is not None
                    self._reads.start(rank, command, command.source)
                    continue
                process = self._process(rank, command)
                if isinstance(command, Load):
                    self._loads.setdefault(command.op, []).append(process)
                self._resume(rank, process)
        if len(self._loads) > _MAX_LOADS:
            self._loads = {op: legs for op, legs in self._loads.items() if any(map(_runs, legs))}

    def poll(self) -> list[Completion]:
        """Let everything happen that is due, and take what was reported."""
        self.advance()
        reports, self._reports = self._reports, []
        return reports

    def advance(self) -> None:
        """Let everything happen that is due."""
        now, agenda = self._clock(), self._agenda
        while agenda and agenda[0][0] <= now:
            _, _, rank, process = heapq.heappop(agenda)
            if rank in self.alive:
                self._resume(rank, process)

    def finish_load(self, op: OperationId) -> bool:
        """Wait for a load, as a model does before it uses a layer. Did all of it arrive?"""
        for process in self._loads.get(op, []):
            for _ in process:
                pass
        return op not in self._failed_loads

    def next_event_s(self) -> float | None:
        if self._reports:
            return self._clock()
        return self._agenda[0][0] if self._agenda else None

    def lose(self, rank: int, reason: str) -> None:
        """The rank is gone with all it was doing; nothing of it is ever heard again."""
        self.alive.remove(rank)
        self._agenda = [entry for entry in self._agenda if entry[2] != rank]
        heapq.heapify(self._agenda)
        self._reports = [r for r in self._reports if isinstance(r, WorkerLost) or r.rank != rank]
        self._reports.append(WorkerLost(rank, reason))

    def kill(self) -> None:
        """All ranks are gone, in the middle of whatever they were doing."""
        agenda, self._agenda, self.alive = self._agenda, [], []
        for _, _, _, process in agenda:
            process.close()

    def _touch(self, rank: int, command: Touch) -> None:
        store = self._attached[rank]
        if store is not None:
            store.touch(split_keys(command.keys), command.component, rank, each=command.each)

    def _cancel(self, rank: int, op: OperationId) -> None:
        if self._serving is not None:
            self._serving.revoke(rank, op, self._served)
        if self._reads is not None:
            self._reads.cancel(rank, op)
        for leg in self._legs.values():
            if leg.rank == rank and leg.op == op:
                leg.cancelled = True

    # ---- processes ------------------------------------------------------------------------------

    def _resume(self, rank: int, process: Process) -> None:
        """Run a process up to its next wait."""
        for wait_s in process:
            if wait_s > 0:
                self._sequence += 1
                entry = (self._clock() + wait_s, self._sequence, rank, process)
                heapq.heappush(self._agenda, entry)
                return

    def _process(self, rank: int, command: Command) -> Process:  # noqa: PLR0911 - a table
        match command:
            case Backup(op, component, device, host):
                leg = _Leg(rank, op, component)
                return self._copy(leg, OperationKind.BACKUP, device, host)
            case Serve():
                return self._serve(_Leg(rank, command.op, command.component), command)
            case Load(op, component, host, device):
                leg = _Leg(rank, op, component)
                return self._copy(leg, OperationKind.LOAD, host, device)
            case Write() | Fetch():
                leg = _Leg(rank, command.op, command.component)
                leg.deadline_s = self._clock() + command.timeout_s
                self._legs[rank, leg.op, leg.component] = leg
                return self._transfer(leg, command, self._attached[rank])
            case Probe():
                leg = _Leg(rank, command.op, command.component)
                return self._probe(leg, command, self._attached[rank])
            case AttachStore() | DetachStore():
                url = command.url if isinstance(command, AttachStore) else None
                return self._change_store(rank, command.op, url)
            case ClearStore(op):
                return self._clear_store(rank, op)
            case Cancel() | Touch() | Disown():
                raise AssertionError("not a process")

    def _copy(self, leg: _Leg, kind: OperationKind, source: bytes, target: bytes) -> Process:
        pools, rank = self._pools, leg.rank
        here, there = (
            (Tier.DEVICE, Tier.HOST) if kind is OperationKind.BACKUP else (Tier.HOST, Tier.DEVICE)
        )
        sources = memoryview(source).cast("i").tolist()
        targets = memoryview(target).cast("i").tolist()
        pools.scribble(rank, there, targets, leg.component)
        outcome = statuses(self._faults.on_call(kind, rank), len(targets))
        whole_s = self._latency.copy_s(rank) + self._copy_lanes[rank].carry_s(len(targets))
        read_s, write_s = moments(self._rng, whole_s)
        yield read_s
        contents = pools.read(rank, here, sources, leg.component)
        yield write_s - read_s
        for page, content, status in zip(targets, contents, outcome, strict=True):
            if status is PageStatus.OK:
                pools.write(rank, there, page, content, leg.component)
        yield whole_s - write_s
        if kind is OperationKind.LOAD and any(outcome):
            self._failed_loads.add(leg.op)
        self._report_pages(leg, 0, outcome, final=True, seconds=whole_s)

    def _transfer(self, leg: _Leg, command: Write | Fetch, store: SimStore | None) -> Process:
        """A write or a fetch: batch by batch, in order; a fetch ends at its first miss."""
        pages = page_array(command.host).tolist()
        fetching = isinstance(command, Fetch)
        parents: list[PageKey] | list[None] = []
        owners: list[Owner | None] = []
        if isinstance(command, Fetch):
            keys = split_keys(command.keys)
        else:
            keys, parents = command.keys_and_parents()
            owners = command.owners()
        found = b"" if isinstance(command, Fetch) or command.has_keys else b"".join(keys)
        none = [None] * len(keys)
        batch = list(zip(keys, pages, parents or none, owners or none, strict=True))
        if fetching:
            self._pools.scribble(leg.rank, Tier.HOST, pages, leg.component)
        at = 0
        while at < len(pages):
            end = min(at + self._batch_pages, len(pages))
            stop = self._reason_to_stop(leg, store)
            if stop is not None:
                outcome = [stop] * (len(pages) - at)
            else:
                lane_s = self._store_lanes[leg.rank].carry_s(end - at)
                batch_s = self._latency.store_s(leg.rank) + lane_s
                move_s = batch_s * self._rng.random()
                fault = self._faults.on_call(
                    OperationKind.FETCH if fetching else OperationKind.WRITE, leg.rank
                )
                yield move_s
                assert store is not None
                move = self._get if fetching else self._put
                outcome = move(leg, store, batch[at:end], fault)
                yield batch_s - move_s
                if PageStatus.OK in outcome:  # what moves is not late
                    leg.deadline_s = self._clock() + command.timeout_s
                if fetching and any(outcome):
                    outcome += [PageStatus.MISS] * (len(pages) - end)
            last = at + len(outcome) == len(pages)
            if last:
                del self._legs[leg.rank, leg.op, leg.component]
            self._report_pages(leg, at, outcome, final=last, seconds=0.0, keys=found)
            at += len(outcome)

    def _reason_to_stop(self, leg: _Leg, store: SimStore | None) -> PageStatus | None:
        if store is None:
            return PageStatus.REJECTED
        if leg.cancelled:
            return PageStatus.CANCELLED
        return PageStatus.TIMEOUT if self._clock() >= leg.deadline_s else None

    def _put(
        self, leg: _Leg, store: SimStore, batch: list[_Stored], fault: Fault | None
    ) -> list[PageStatus]:
        outcome = statuses(fault, len(batch))
        pages = [page for _, page, _, _ in batch]
        contents = self._pools.read(leg.rank, Tier.HOST, pages, leg.component)
        for at, ((key, _, parent, owner), content) in enumerate(zip(batch, contents, strict=True)):
            if outcome[at] is PageStatus.OK and fault is not Fault.LOST:
                outcome[at] = store.put((key, leg.component, leg.rank), content, parent, owner)
        return outcome

    def _get(
        self, leg: _Leg, store: SimStore, batch: list[_Stored], fault: Fault | None
    ) -> list[PageStatus]:
        outcome = statuses(fault, len(batch))
        store.touch([key for key, _, _, _ in batch], leg.component, leg.rank)
        for at, (key, page, _, _) in enumerate(batch):
            content = store.get((key, leg.component, leg.rank))
            if outcome[at] is PageStatus.OK:
                if content is None:
                    outcome[at] = PageStatus.MISS
                else:
                    self._pools.write(leg.rank, Tier.HOST, page, content, leg.component)
        return outcome

    # ---- peers ----------------------------------------------------------------------------------

    def _serve(self, leg: _Leg, command: Serve) -> Process:
        pages = page_array(command.host).tolist()
        if self._serving is None or self._faults.on_call(OperationKind.SERVE, leg.rank) is not None:
            yield self._latency.copy_s(leg.rank)
            self._report_pages(leg, 0, [PageStatus.FAILED] * len(pages), final=True, seconds=0.0)
        else:
            self._serving.grant(leg.rank, leg.op, leg.component, pages)

    def _served(self, rank: int, op: OperationId, component: str, count: int) -> None:
        """Nobody reads them any more."""
        if rank in self.alive:
            self._resume(rank, self._say_served(_Leg(rank, op, component), count))

    def _say_served(self, leg: _Leg, count: int) -> Process:
        yield self._latency.copy_s(leg.rank) * self._rng.random()
        self._report_pages(leg, 0, [PageStatus.OK] * count, final=True, seconds=0.0)

    # ---- the store ------------------------------------------------------------------------------

    def _probe(self, leg: _Leg, command: Probe, store: SimStore | None) -> Process:
        fault = self._faults.on_call(OperationKind.PROBE, leg.rank)
        whole_s = self._latency.store_s(leg.rank)
        look_s = whole_s * self._rng.random()
        yield look_s
        queries = [split_keys(query) for query in command.queries]
        present = [bytes(len(query)) for query in queries]
        if store is not None and fault is not Fault.FAIL:
            present = [store.present(query, leg.component, leg.rank) for query in queries]
        if fault is Fault.SHORT:
            present = [there[: len(there) // 2].ljust(len(there), b"\0") for there in present]
        elif fault is Fault.MALFORMED:
            present = present[1:]
        yield whole_s - look_s
        hits = [(there + b"\0").index(0) for there in present]
        answer: dict[str, Any] = {"present": present} if command.each else {"hits": hits}
        self._reports.append(Probed(leg.op, leg.rank, leg.component, **answer))

    def _change_store(self, rank: int, op: OperationId, url: str | None) -> Process:
        fault = self._faults.on_call(OperationKind.STORE, rank)
        yield self._latency.store_s(rank)
        if url is None:
            self._attached[rank] = None
        elif fault is None:
            self._attached[rank] = self._stores.open(url)
        failed = url is not None and fault is not None
        self._reports.append(StoreChanged(op, rank, "the store did not open" if failed else ""))

    def _clear_store(self, rank: int, op: OperationId) -> Process:
        fault = self._faults.on_call(OperationKind.STORE, rank)
        yield self._latency.store_s(rank)
        store = self._attached[rank]
        if store is not None and fault is None:
            store.clear()
        self._reports.append(StoreChanged(op, rank, "the store was not cleared" if fault else ""))

    def _report_read(
        self, rank: int, command: Fetch, first: int, outcome: list[PageStatus], final: bool
    ) -> None:
        leg = _Leg(rank, command.op, command.component)
        self._report_pages(leg, first, outcome, final=final, seconds=0.0)

    def _report_pages(
        self,
        leg: _Leg,
        first: int,
        outcome: list[PageStatus],
        *,
        final: bool,
        seconds: float,
        keys: bytes = b"",
    ) -> None:
        said = bytes(outcome), final, seconds, keys if final else b""
        self._reports.append(Transferred(leg.op, leg.rank, leg.component, first, *said))
