"""Writer: keeps computed pages alive: device → host (backup), host → store (write).

Runs once per step over everything that became due, in one operation each per component. Backups
follow the write policy: full pages as they are computed, windows where a request comes to rest,
snapshots when they are taken. Writes follow backups: whatever reaches the host goes to the store. A
page that the store did not take is tried again a few times, and after that by the next request
that uses it, so that no hole stays to hide the pages behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from quire.components import Component, Guard
from quire.config import WritePolicy
from quire.manager.core import Core
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Backup, Write
from quire.tree import Node, slot_of
from quire.types import DEVICE, FILLING, HOST, READY, OperationId, PageIds, PageStatus, num_pages

BACKUP_TIMEOUT_S = 60.0
LOOK_AHEAD = 32
"""Cold holdings looked at per step for copying out ahead of eviction."""
MAX_QUEUED_NODES = 1 << 16
INFLIGHT_WRITE_SHARE = 0.25
"""Share of the host pool that writes in flight may pin: a slow store must not fill the host."""


class Span:
    """One node of an operation, remembered as (its end, what was above it): survives splits."""

    __slots__ = ("attempt", "cold", "size", "stop", "tail")

    def __init__(self, node: Node, size: int, *, cold: bool = False, attempt: int = 0) -> None:
        assert node.parent is not None
        self.tail = node
        self.stop = node.parent
        self.size = size
        self.cold = cold
        """Backups: started because the device will soon let go of it."""
        self.attempt = attempt
        """Writes: tries made before this one."""


class Writer:
    """Backups and writes of one component."""

    def __init__(self, core: Core, component: Component) -> None:
        self._core = core
        self._component = component
        self._index = component.index
        self._is_point = component.is_point
        self._device = slot_of(component.index, DEVICE)
        self._host = slot_of(component.index, HOST)
        self._to_back_up: dict[Node, Node] = {}
        """Nodes due, each with its parent then: a node split meanwhile is due in all its parts."""
        self._cold: set[Node] = set()
        """Those of them that are due because the device will soon let go of them."""
        self._demanded: set[Node] = set()
        """Those that somebody waits for."""
        self._to_write: dict[Node, Span] = {}
        """Waiting for a write, by their lower end."""
        self._retries: list[tuple[float, int, Span]] = []
        """Due time, a number to break ties, and what to write then."""
        self._sequence = 0
        self._spans: dict[OperationId, list[Span]] = {}
        self._epochs: dict[OperationId, int] = {}
        """Writes only: the store they go to."""
        self._writing: set[Node] = set()
        self._inflight_pages = 0
        self._seen = 0
        """Pages committed and evicted up to the last look at the cold end."""
        config = core.config
        self._keeps = config.write.enabled
        self._at_once = config.write.policy is WritePolicy.WRITE_THROUGH
        self._selective = config.write.policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        device, host = core.allocators[self._device], core.allocators[self._host]
        self._low_pages = int(config.write.low_watermark * device.num_pages)
        self._high_pages = int(config.write.high_watermark * device.num_pages)
        self._max_inflight = max(1, int(host.num_pages * INFLIGHT_WRITE_SHARE))

    # ---- what becomes due -----------------------------------------------------------------------

    def committed(self, node: Node) -> None:
        """It is on the device now, for others to use."""
        if self._at_once and self._keeps:
            self._want_backup(node)

    def used(self, tail: Node) -> None:
        """A request has hit a path: selective write-through counts, and holes are repaired."""
        epoch, selective = self._core.store_epoch, self._selective
        if (not selective and epoch == 0) or not self._keeps:
            return
        node, index, host = tail, self._index, self._host
        while (parent := node.parent) is not None:
            if selective and self._is_proven(node):
                self._want_backup(node)
            stored = node.stored_in(index) if index else node.stored
            if stored != epoch and node.held[host] is not None:
                self._want_write(node)
            node = parent

    def demand(self, node: Node) -> None:
        """A peer is to read it: it is copied to the host whatever the policy, evicting if need
        be. Asked for again until it is there."""
        self._want_backup(node)
        self._demanded.add(node)

    def _is_proven(self, node: Node) -> bool:
        return node.hits >= self._core.config.write.selective_hits

    def _want_backup(self, node: Node) -> None:
        assert node.parent is not None
        self._to_back_up.setdefault(node, node.parent)

    def _want_write(self, node: Node) -> None:
        if self._core.store_epoch and self._keeps and node not in self._to_write:
            self._queue_write(Span(node, self._size(node)))

    def _queue_write(self, span: Span) -> None:
        self._to_write[span.tail] = span
        if len(self._to_write) > MAX_QUEUED_NODES:
            oldest = self._to_write.pop(next(iter(self._to_write)))
            self._core.counters.write_failed_pages += oldest.size

    def flush(self) -> None:
        """Start what is due. Called at the end of each step."""
        if self._core.config.host_pages == 0 or not self._core.healthy:
            self._to_back_up.clear()
            self._demanded.clear()
            self._to_write.clear()
            self._retries.clear()  # or next_retry() would stay in the past
            return
        if self._keeps:
            self._clean_ahead()
        if self._to_back_up:
            self._start_backups()
        now = self._core.clock()
        while self._retries and self._retries[0][0] <= now:
            self._queue_write(heapq.heappop(self._retries)[-1])
        if self._core.store_epoch == 0:
            self._to_write.clear()
        elif self._to_write:
            self._start_writes()

    @property
    def has_work(self) -> bool:
        return bool(self._to_back_up or self._to_write)

    def next_retry(self) -> float | None:
        return self._retries[0][0] if self._retries else None

    # ---- device → host --------------------------------------------------------------------------

    def _clean_ahead(self) -> None:
        """Short of device pages: copy out the coldest that the host lacks, before they must go."""
        core = self._core
        moved = core.counters.evicted_device_pages + core.counters.committed_pages
        if moved == self._seen:
            return  # the cold end is as it was
        self._seen = moved
        covered = core.allocators[self._device].num_free
        if covered >= self._low_pages:
            return
        for holding in islice(core.tree.standing.orders[self._device].coldest(), LOOK_AHEAD):
            if covered >= self._high_pages:
                break
            covered += num_pages(holding.pages)
            node = holding.node
            if holding.locks or node.held[self._host] is not None:
                continue
            if not self._selective or self._is_proven(node):
                self._want_backup(node)
                self._cold.add(node)

    def _start_backups(self) -> None:
        core = self._core
        due, self._to_back_up = self._to_back_up, {}
        cold, self._cold = self._cold, set()
        demanded, self._demanded = self._demanded, set()
        spans: list[Span] = []
        guards: list[Guard] = []
        for tail, stop in due.items():
            for node in self._parts(tail, stop):
                if not self._is_dirty(node):
                    continue
                size = self._size(node)
                urgent = tail in cold or tail in demanded
                if not urgent and self._only_displaces(size):
                    core.counters.backup_deferred_pages += size
                    continue
                held = core.hold(node, self._device)
                if self._reserve_host(node, size):
                    spans.append(Span(node, size, cold=tail in cold))
                    guards += held
                else:
                    core.unprotect(held)
                    core.tidy((node,))
                    core.counters.backup_skipped_pages += size
        if not spans:
            return
        op = core.operations.start(
            Kind.BACKUP,
            {self._component.name: sum(span.size for span in spans)},
            now=core.clock(),
            timeout_s=BACKUP_TIMEOUT_S,
            on_report=self._backup_reported,
            guards=guards,
        )
        self._spans[op.id] = spans
        device, host = _joined(spans, self._device), _joined(spans, self._host)
        core.outbox.append(Backup(op.id, self._component.name, device, host))

    def _is_dirty(self, node: Node) -> bool:
        """On the device and not on the host."""
        device, host = node.held[self._device], node.held[self._host]
        return device is not None and device.state is READY and host is None

    def _only_displaces(self, size: int) -> bool:
        """Would copying a hot page now only displace another copy?

        It needs its host copy when it grows cold, and `_clean_ahead` sees to that. Before, the
        copy is worth a free page of the host, or the way to the store, but no eviction.
        """
        if self._core.store_epoch:
            return False
        return self._core.allocators[self._host].num_free < size

    def _reserve_host(self, node: Node, size: int) -> bool:
        """Give the node its FILLING host holding."""
        pages = self._core.reserve(self._host, size)
        if pages is None:
            return False
        self._core.tree.attach(node, self._host, pages, FILLING)
        return True

    def _backup_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core = self._core
        slot = self._host
        for span, node, size, good in self._outcomes(op):
            if good:
                core.tree.make_ready(node, slot)
                core.stored(node, slot)
                if span.cold:
                    core.tree.standing.keep_spare(node, slot)
                core.counters.backed_up_pages += size
                if node.stored_in(self._index) != core.store_epoch:
                    self._want_write(node)
            else:
                core.counters.backup_failed_pages += size
                core.release(core.tree.detach(node, slot))
        del self._spans[op.id]
        core.finish(op)

    # ---- host → store ---------------------------------------------------------------------------

    def _start_writes(self) -> None:
        core = self._core
        spans: list[Span] = []
        guards: list[Guard] = []
        while self._to_write and self._inflight_pages < self._max_inflight:
            waiting = self._to_write.pop(next(iter(self._to_write)))
            for node in self._parts(waiting.tail, waiting.stop):
                if node in self._writing or node.stored_in(self._index) == core.store_epoch:
                    continue
                if not self._on_host(node):
                    continue  # gone from there meanwhile, or not there yet
                whole = node is waiting.tail and node.parent is waiting.stop
                span = waiting
                if not whole:
                    span = Span(node, self._size(node), attempt=waiting.attempt)
                spans.append(span)
                self._writing.add(node)
                guards += core.hold(node, self._host)
                self._inflight_pages += span.size
        if not spans:
            return
        timeout_s = core.config.write.timeout_s
        op = core.operations.start(
            Kind.WRITE,
            {self._component.name: sum(span.size for span in spans)},
            now=core.clock(),
            timeout_s=timeout_s * 2,  # the worker gives up first
            on_report=self._write_reported,
            guards=guards,
        )
        self._spans[op.id] = spans
        self._epochs[op.id] = core.store_epoch
        keys_of = core.tree.last_key_of if self._is_point else core.tree.keys_of
        keys = b"".join(keys_of(span.tail) for span in spans)
        host = _joined(spans, self._host)
        core.outbox.append(Write(op.id, self._component.name, host, keys, timeout_s))

    def _on_host(self, node: Node) -> bool:
        holding = node.held[self._host]
        return holding is not None and holding.state is READY

    def _write_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core = self._core
        epoch = self._epochs.pop(op.id)
        rejected = not op.all_ok() and PageStatus.REJECTED in op.page_statuses()
        for span, node, size, good in self._outcomes(op):
            self._inflight_pages -= size
            self._writing.discard(node)
            if good:
                core.counters.written_pages += size
                node.set_stored(self._index, epoch)
                core.written(node, self._component)
            elif epoch == core.store_epoch:
                self._retry(Span(node, size, attempt=span.attempt + 1), hopeless=rejected)
        del self._spans[op.id]
        core.finish(op)

    def _retry(self, span: Span, *, hopeless: bool) -> None:
        """Soon again, unless it was tried enough or the store takes nothing at the moment."""
        config = self._core.config.write
        if hopeless or span.attempt >= config.max_attempts:
            self._core.counters.write_failed_pages += span.size
            return
        self._core.counters.write_retried_pages += span.size
        due = self._core.clock() + config.retry_delay_s * 2 ** (span.attempt - 1)
        self._sequence += 1
        heapq.heappush(self._retries, (due, self._sequence, span))

    # ---- shared ---------------------------------------------------------------------------------

    def _size(self, node: Node) -> int:
        """Pages this component has of a node."""
        return 1 if self._is_point else node.num_pages

    def _parts(self, tail: Node, stop: Node) -> list[Node]:
        """The node, or what it was split into, parents first."""
        if tail.parent is stop or self._is_point:
            return [tail]
        return list(self._core.tree.path(tail, stop))[::-1]

    def _outcomes(self, op: Operation) -> Iterator[tuple[Span, Node, int, bool]]:
        """Every node of the operation, as it is cut now, its pages, and whether all are OK."""
        clean = op.all_ok()
        statuses = b"" if clean else op.page_statuses()
        at = 0
        for span in self._spans[op.id]:
            parts = self._parts(span.tail, span.stop)
            for node in parts:
                size = span.size if len(parts) == 1 else node.num_pages
                if clean:
                    yield span, node, size, True
                    continue
                mine = statuses[at : at + size]
                if any(mine):
                    self._core.count_faults(op.kind, mine)
                yield span, node, size, not any(mine)
                at += size


class Writers:
    """A Writer for each component; the first has `full`."""

    def __init__(self, core: Core) -> None:
        self._writers = [Writer(core, component) for component in core.components]

    def committed(self, node: Node) -> None:
        self._writers[0].committed(node)

    def settled(self, due: Iterable[tuple[int, Node]]) -> None:
        """State of other components, by their index, that is there to stay."""
        for component, node in due:
            self._writers[component].committed(node)

    def used(self, tail: Node) -> None:
        for writer in self._writers:
            writer.used(tail)

    def demand(self, component: int, node: Node) -> None:
        self._writers[component].demand(node)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    @property
    def has_work(self) -> bool:
        return any(writer.has_work for writer in self._writers)

    def next_retry(self) -> float | None:
        times = [writer.next_retry() for writer in self._writers]
        return min((time for time in times if time is not None), default=None)


def _joined(spans: list[Span], slot: int) -> PageIds:
    pages = []
    for span in spans:
        holding = span.tail.held[slot]
        assert holding is not None
        pages.append(holding.pages)
    return PageIds(b"".join(pages))
