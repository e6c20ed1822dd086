"""Writer: keeps computed pages alive: device → host (backup), host → store (write).

Runs once per step over everything that became due, in one operation each per component. Backups
follow the write policy: full pages as they are computed, windows where a request comes to rest,
snapshots when they are taken; and whatever the host cannot do without (see tree/stays.py) as soon
as it can be copied. A page goes to the host with all before it that the host lacks, so that what
the host has never hangs on the device. Writes follow backups: whatever reaches the host goes to
the store. A page that the store did not take is tried again a few times, and after that by the
next request that uses it; one whose prefix the store has lost, with that prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

import msgspec

from quire.components import Component, Guard
from quire.config import WritePolicy
from quire.manager.core import Core
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Backup, Run, Touch, Write
from quire.tree import NUM_TIERS, Node, slot_of
from quire.types import (
    DEVICE,
    FILLING,
    HOST,
    NO_PARENT,
    PAGE_KEY_BYTES,
    READY,
    OperationId,
    PageIds,
    PageStatus,
    num_pages,
)

BACKUP_TIMEOUT_S = 60.0
LOOK_AHEAD = 128
"""Cold holdings looked at, at most, for copying out ahead of eviction."""
MAX_QUEUED_NODES = 1 << 16
INFLIGHT_WRITE_SHARE = 0.25
"""Share of the host pool that writes in flight may pin: a slow store must not fill the host."""
NEED_DECAY = 0.9
"""By which the most that a step took counts less after each step that moves pages."""
TOUCH_EVERY_S = 5.0
TOUCHED_PAGES = 1 << 13
"""Pages, and a path more, of which the store is told at a time that they were used."""


class Span:
    """One node of an operation, remembered as (its end, its first page): survives splits."""

    __slots__ = ("attempt", "cold", "first", "tail", "urgent")

    def __init__(self, node: Node, *, cold: bool = False, urgent: bool = False) -> None:
        self.tail = node
        self.first = node.start
        self.cold = cold
        """Backups: due because the device will soon let go of it."""
        self.urgent = urgent
        """Backups: somebody waits for it, or the host cannot do without it."""
        self.attempt = 0
        """Tries made before this one."""

    def of(self, node: Node) -> Span:
        """The same for one of its nodes, or one above it."""
        if node is self.tail and node.start == self.first:
            return self
        span = Span(node, cold=self.cold, urgent=self.urgent)
        span.attempt = self.attempt
        return span

    def nodes(self) -> list[Node]:
        """The node, or what it was split into, parents first."""
        nodes, above = [self.tail], self.tail.parent
        while above is not None and above.end > self.first:
            nodes.insert(0, above)
            above = above.parent
        return nodes


Outcome = tuple[Span, Node, int, bytes]
"""A node of an operation, its pages, and what became of them; no statuses: all is well."""


class Writer:
    """Backups and writes of all components."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._forgiven: dict[tuple[Node, int], None] = {}
        """Node and device slot of what the host needs a copy of and had no room for."""
        self._lines = [_Line(core, component, self._forgiven) for component in core.components]
        self._touched: dict[Node, None] = {}
        """Ends of paths that were used and that the store may have, oldest use first."""
        self._next_touch_s = 0.0

    def committed(self, node: Node) -> None:
        """Full pages that were computed are on the device now, for others to use."""
        self._lines[0].committed(node)

    def settled(self, due: Iterable[tuple[int, Node]]) -> None:
        """State of other components, by their index, that is there to stay."""
        for component, node in due:
            self._lines[component].committed(node)

    def used(self, tail: Node) -> None:
        """A request has hit a path."""
        if self._core.store_epoch:
            self._touched.pop(tail, None)
            self._touched[tail] = None
            if len(self._touched) > TOUCHED_PAGES:
                self._touched.pop(next(iter(self._touched)))
        for line in self._lines:
            line.used(tail)

    def expect(self, num_pages: int) -> None:
        """A request has arrived that will take so many device pages once it is its turn."""
        self._lines[0].expect(num_pages)

    def demand(self, component: int, node: Node) -> None:
        """A peer is to read it: it is copied to the host whatever the policy, evicting if need
        be. Asked for again until it is there."""
        self._lines[component].want_backup(node, urgent=True)

    def flush(self) -> None:
        """Start what is due. Called at the end of each step."""
        core = self._core
        if core.config.host_pages == 0 or core.operations.lost_ranks:
            for node, slot in list(core.tree.stays.owing):
                core.tree.stays.forgive(node, slot)
            for line in self._lines:
                line.clear()
            return
        if core.tree.stays.owing or self._forgiven:
            self._settle_debts()
        if core.refused:
            core.refused.clear()
        for line in self._lines:
            line.flush()
        if self._touched and core.clock() >= self._next_touch_s:
            self._touch()

    def _settle_debts(self) -> None:
        """Have copied what the host lacks and needs; what it has no room for may go without, until
        there is room for it that is nobody else's."""
        stays = self._core.tree.stays
        for node, slot in list(self._forgiven):
            held = node.held[slot]
            if held is None or not held.forgiven:
                del self._forgiven[node, slot]
            elif self._core.allocators[slot + HOST].num_free >= num_pages(held.pages):
                del self._forgiven[node, slot]
                stays.claim(node, slot)
        for node, slot in stays.owing:
            self._lines[slot // NUM_TIERS].owed(node)
        for node, slot in self._forgiven:
            stays.forgive(node, slot)

    @property
    def has_work(self) -> bool:
        return any(line.has_work for line in self._lines)

    @property
    def num_waiting(self) -> int:
        return sum(line.num_waiting for line in self._lines)

    def next_retry(self) -> float | None:
        times = [line.next_retry() for line in self._lines]
        return min((time for time in times if time is not None), default=None)

    def _touch(self) -> None:
        """Tell the store which paths were used here: what is hot in memory must not grow cold
        there."""
        core, used, room = self._core, self._touched, TOUCHED_PAGES
        self._touched, self._next_touch_s = {}, core.clock() + TOUCH_EVERY_S
        if not core.store_epoch:
            return
        seen: set[Node] = set()
        for tail in reversed(used):
            if tail in seen or not any(tail.held):
                continue  # a longer path passes it, or it is gone
            path = list(core.tree.path(tail))
            seen.update(path)
            keys = b""
            for node in reversed(path):
                if node.stored != core.store_epoch or node.page_keys is None:
                    break
                keys += node.page_keys
            if keys:
                core.outbox.append(Touch(core.components[0].name, keys))
            room -= len(keys) // PAGE_KEY_BYTES
            if room < 0:
                break


class _Line:
    """Backups and writes of one component."""

    def __init__(
        self, core: Core, component: Component, forgiven: dict[tuple[Node, int], None]
    ) -> None:
        self._core = core
        self._forgiven = forgiven
        self._component = component
        self._index = component.index
        self._is_point = component.is_point
        self._device = slot_of(component.index, DEVICE)
        self._host = slot_of(component.index, HOST)
        self._to_back_up: dict[Node, Span] = {}
        self._to_write: dict[Node, Span] = {}
        """Both by their lower end."""
        self._retries: list[tuple[float, int, Span]] = []
        """Due time, a number to break ties, and what to write then."""
        self._sequence = 0
        self._spans: dict[OperationId, list[Span]] = {}
        self._epochs: dict[OperationId, int] = {}
        """Writes only: the store they go to."""
        self._writing: set[Node] = set()
        """On their way to the store, or behind what is."""
        self._behind: dict[Node, list[Span]] = {}
        """By what is being written: what hangs under it, and is written when that has ended."""
        self._inflight_pages = 0
        self._need = 0.0
        """Device pages that a step takes, by the largest of the last ones; or that a request will
        take which has arrived."""
        self._expected = 0
        """By the largest request that has arrived since the last look at the cold end."""
        self._clean_until = 0
        """So many pages will have been evicted when those are gone that were seen to at the last
        look."""
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
        if self._at_once and self._keeps:
            self.want_backup(node)

    def used(self, tail: Node) -> None:
        """Selective write-through counts, and holes in the store are repaired."""
        epoch, selective = self._core.store_epoch, self._selective
        if (not selective and epoch == 0) or not self._keeps:
            return
        node, index, host = tail, self._index, self._host
        while (parent := node.parent) is not None:
            if selective and self._is_proven(node):
                self.want_backup(node)
            stored = node.stored_in(index) if index else node.stored
            if stored != epoch and node.held[host] is not None:
                self._want_write(node)
            node = parent

    def expect(self, num_pages: int) -> None:
        self._expected = max(self._expected, num_pages)

    def want_backup(self, node: Node, *, urgent: bool = False, cold: bool = False) -> None:
        span = self._to_back_up.get(node)
        if span is None:
            span = self._to_back_up[node] = Span(node)
            node.named += 1
        span.urgent |= urgent
        span.cold |= cold

    def owed(self, node: Node) -> None:
        """The host has what is of no use without it. Full pages are copied at once; other state,
        which may soon be of no use itself, when the device runs short of room for it, and to free
        pages only: else two such copies could displace each other for ever."""
        core, device = self._core, self._device
        if self._index == 0:
            self.want_backup(node, urgent=True)
        elif core.room(device) < max(core.refused.get(device, 0), self._high_pages):
            if core.allocators[self._host].num_free >= self._size(node):
                self.want_backup(node, urgent=True)
            else:
                self._forgiven[node, device] = None

    def _is_proven(self, node: Node) -> bool:
        return node.hits >= self._core.config.write.selective_hits

    def _want_write(self, node: Node) -> None:
        if self._core.store_epoch and self._keeps and node not in self._to_write:
            self._queue_write(Span(node))

    def _queue_write(self, span: Span) -> None:
        if span.tail not in self._to_write:
            span.tail.named += 1
        self._to_write[span.tail] = span
        if len(self._to_write) > MAX_QUEUED_NODES:
            oldest = self._next_write()
            self._core.counters.write_failed_pages += self._size(oldest.tail)
            self._let_follow(oldest.tail)

    def _next_write(self) -> Span:
        span = self._to_write.pop(next(iter(self._to_write)))
        span.tail.named -= 1
        return span

    def _next_retry(self) -> Span:
        span = heapq.heappop(self._retries)[-1]
        span.tail.named -= 1
        return span

    def clear(self) -> None:
        """Nothing can be copied any more."""
        self._take_backups()
        self._clear_writes()
        while self._retries:  # or next_retry() would stay in the past
            self._next_retry()

    def _take_backups(self) -> dict[Node, Span]:
        due, self._to_back_up = self._to_back_up, {}
        for node in due:
            node.named -= 1
        return due

    def _clear_writes(self) -> None:
        for node in list(self._behind):
            self._let_follow(node)
        while self._to_write:
            self._next_write()

    def flush(self) -> None:
        counters = self._core.counters
        moved = counters.evicted_device_pages + counters.committed_pages
        if moved != self._seen or self._expected:  # else the cold end is as it was
            self._seen = moved
            if self._keeps:
                self._clean_ahead()
        if self._to_back_up:
            self._start_backups()
        if self._retries:
            now = self._core.clock()
            while self._retries and self._retries[0][0] <= now:
                self._queue_write(self._next_retry())
        if self._to_write:
            if self._core.store_epoch:
                self._start_writes()
            else:
                self._clear_writes()

    @property
    def has_work(self) -> bool:
        return bool(self._to_back_up or self._to_write)

    @property
    def num_waiting(self) -> int:
        return len(self._to_write) + len(self._behind) + len(self._retries)

    def next_retry(self) -> float | None:
        return self._retries[0][0] if self._retries else None

    # ---- device → host --------------------------------------------------------------------------

    def _clean_ahead(self) -> None:
        """Short of device pages, by the watermarks and by what steps take: copy out the coldest
        that the host lacks, before they must go. Every copy made too early is room on the host
        that holds nothing new."""
        core = self._core
        need = max(core.taken[self._device], self._expected, self._need * NEED_DECAY)
        core.taken[self._device] = self._expected = 0
        self._need = need
        free, evicted = core.allocators[self._device].num_free, core.counters.evicted_device_pages
        if free + self._clean_until - evicted >= max(self._low_pages, need):
            return
        covered, wanted = free, max(self._high_pages, need)
        for holding in islice(core.tree.standing.orders[self._device].coldest(), LOOK_AHEAD):
            if covered >= wanted:
                break
            node = holding.node
            host = node.held[self._host]
            if holding.reasons and (host is None or host.state is READY):
                continue  # in use: it will not make room
            covered += num_pages(holding.pages)
            if host is None and (not self._selective or self._is_proven(node)):
                self.want_backup(node, cold=True)
        self._clean_until = evicted + int(covered) - free

    def _start_backups(self) -> None:
        core = self._core
        spans: list[Span] = []
        guards: list[Guard] = []
        for due in self._take_backups().values():
            missing = self._missing(due)
            for node in missing:
                if not self._is_dirty(node):
                    break  # it went when room was made for those before it
                held = self._reserve_host(node, due)
                if held is None:  # what lies below would hang in the air
                    self._skip(missing[missing.index(node) :], due)
                    break
                # What others have used since stays on the device: its copy is spare.
                span = due.of(node)
                span.cold = due.cold and node.last_use <= due.tail.last_use
                spans.append(span)
                guards += held
        if not spans:
            return
        device, host = _joined(spans, self._device), _joined(spans, self._host)
        op = core.operations.start(
            Kind.BACKUP,
            {self._component.name: num_pages(host)},
            now=core.clock(),
            timeout_s=BACKUP_TIMEOUT_S,
            on_report=self._backup_reported,
            guards=guards,
        )
        self._spans[op.id] = spans
        core.outbox.append(Backup(op.id, self._component.name, device, host))

    def _missing(self, due: Span) -> list[Node]:
        """What of a span the host lacks, and of full pages all before it, parents first."""
        nodes = due.nodes() if not self._is_point else [due.tail]
        if self._index == 0:
            above = nodes[0].parent
            while above is not None and above.parent is not None and above.held[HOST] is None:
                nodes.insert(0, above)
                above = above.parent
        return [node for node in nodes if self._is_dirty(node)]

    def _is_dirty(self, node: Node) -> bool:
        """On the device and not on the host."""
        device, host = node.held[self._device], node.held[self._host]
        return device is not None and device.state is READY and host is None

    def _reserve_host(self, node: Node, due: Span) -> list[Guard] | None:
        """Give the node its FILLING host holding; returns the locks on what is copied."""
        core, size = self._core, self._size(node)
        is_free = core.allocators[self._host].num_free >= size
        if not is_free and not self._is_worth_room(due):
            return None
        held, above = core.hold(node, self._device), node.parent
        assert above is not None
        # What it will hang under on the host must not be what makes room for it.
        path = [] if is_free or above.held[HOST] is None else core.hold(above, HOST)
        pages = core.reserve(self._host, size)
        if pages is not None:
            core.tree.attach(node, self._host, pages, FILLING)
        core.unprotect(path)
        if pages is None:
            core.unprotect(held)
            core.tidy((node,))
            return None
        return held

    def _skip(self, nodes: list[Node], due: Span) -> None:
        """The host has no room for these. What owes it a copy may go without one."""
        size = sum(map(self._size, nodes))
        if self._is_worth_room(due):
            self._core.counters.backup_skipped_pages += size
            for node in nodes:
                self._forgiven[node, self._device] = None
                self._core.tree.stays.forgive(node, self._device)
        else:
            self._core.counters.backup_deferred_pages += size

    def _is_worth_room(self, due: Span) -> bool:
        """May others be evicted from the host for it? A hot page needs its host copy when it grows
        cold, and `_clean_ahead` sees to that; before, the copy is worth a free page of the host, or
        the way to the store, but no eviction."""
        return due.urgent or due.cold or self._core.store_epoch > 0

    def _backup_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core, slot = self._core, self._host
        outcomes = self._outcomes(op)
        failed: list[Outcome] = []
        for outcome in outcomes:
            span, node, size, statuses = outcome
            if any(statuses):
                failed.insert(0, outcome)
                continue
            core.tree.make_ready(node, slot)
            core.announce_stored(node, slot)
            if span.cold:
                core.tree.standing.keep_spare(node, slot)
            core.counters.backed_up_pages += size
            if node.stored_in(self._index) != core.store_epoch:
                self._want_write(node)
        for _, node, size, _ in failed:
            core.counters.backup_failed_pages += size
            core.release(core.tree.detach(node, slot))
        core.finish(op)
        for span, node, _, _ in failed:  # what the host cannot do without is tried once more
            if span.attempt:
                core.tree.stays.forgive(node, self._device)
            elif (node, self._device) in core.tree.stays.owing:
                self.want_backup(node, urgent=True)
                self._to_back_up[node].attempt = 1
        if not core.store_epoch:  # else they are on their way there
            self._rest(outcomes)

    # ---- host → store ---------------------------------------------------------------------------

    def _start_writes(self) -> None:
        core = self._core
        spans: dict[Node, Span] = {}
        guards: list[Guard] = []
        while self._to_write and self._inflight_pages < self._max_inflight:
            waiting = self._next_write()
            for node in [waiting.tail] if self._is_point else waiting.nodes():
                if node in spans or node in self._writing:
                    continue
                if not self._is_to_write(node):
                    self._let_follow(node)
                    continue
                if node.parent in self._writing:
                    node.named += 1
                    self._writing.add(node)
                    self._behind.setdefault(node.parent, []).append(waiting.of(node))
                    continue
                spans[node] = waiting.of(node)
                guards += core.hold(node, self._host)
                self._inflight_pages += self._size(node)
        if not spans:
            return
        self._writing.update(spans)
        host, timeout_s = _joined(spans.values(), self._host), core.config.write.timeout_s
        op = core.operations.start(
            Kind.WRITE,
            {self._component.name: num_pages(host)},
            now=core.clock(),
            timeout_s=timeout_s * 2,  # the worker gives up first
            on_report=self._write_reported,
            guards=guards,
        )
        self._spans[op.id] = list(spans.values())
        self._epochs[op.id] = core.store_epoch
        runs = self._runs(spans)
        core.outbox.append(Write(op.id, self._component.name, host, runs, timeout_s))

    def _is_to_write(self, node: Node) -> bool:
        """Is it on the host, and not in the store?"""
        holding = node.held[self._host]
        there = holding is not None and holding.state is READY
        return there and node.stored_in(self._index) != self._core.store_epoch

    def _let_follow(self, node: Node) -> None:
        """What waited for a node's write waits no longer."""
        for span in self._behind.pop(node, ()):
            span.tail.named -= 1
            self._writing.discard(span.tail)
            self._queue_write(span)

    def _runs(self, nodes: Iterable[Node]) -> list[Run]:
        """The names of these nodes' pages; full pages whose keys nobody has needed yet are named by
        their tokens."""
        tree, runs = self._core.tree, list[Run]()
        if self._index:
            return [Run(keys=self._core.keys_of(node, self._component)) for node in nodes]
        before: Node | None = None
        for node in nodes:
            above = node.parent
            assert above is not None
            if node.page_keys is None and above is before and runs[-1].tokens:
                last = runs.pop()
                tokens = last.tokens + node.tokens[last.page_width - last.page_bytes :]
                runs.append(msgspec.structs.replace(last, tokens=tokens))
            else:
                root = None if above.parent is not None else tree.root_of(above)
                parent = tree.last_key_of(above) if root is None else NO_PARENT
                if node.page_keys is not None:
                    runs.append(Run(parent, node.page_keys))
                else:
                    root = root or tree.root_of(above)
                    seed = parent if above is not root else root.digest
                    sizes = root.page_bytes, root.page_width
                    runs.append(Run(parent, b"", seed, bytes(node.tokens), *sizes))
            before = node
        return runs

    def _write_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core, outcomes = self._core, self._outcomes(op)
        epoch, at = self._epochs.pop(op.id), 0
        named = self._index == 0 and len(op.keys) == op.num_pages * PAGE_KEY_BYTES
        for span, node, size, statuses in outcomes:
            self._inflight_pages -= size
            self._writing.discard(node)
            if named and node.page_keys is None:
                node.page_keys = op.keys[at * PAGE_KEY_BYTES : (at + size) * PAGE_KEY_BYTES]
            at += size
            if not any(statuses):
                core.counters.written_pages += size
                node.set_stored(self._index, epoch)
                core.announce_written(node, self._component)
            elif epoch == core.store_epoch:
                if PageStatus.ORPHAN in statuses:
                    self._write_prefix(node)
                again = Span(node)
                again.attempt = span.attempt + 1
                self._retry(again, size, hopeless=PageStatus.REJECTED in statuses)
            self._let_follow(node)
        core.finish(op)
        self._rest(outcomes)

    def _write_prefix(self, node: Node) -> None:
        """The store has lost what a node hangs under: it is written again, top first."""
        missing = [n for n in self._core.tree.path(node) if n is not node]
        for above in reversed(missing):
            above.set_stored(self._index, 0)
            if above.held[self._host] is not None:
                self._want_write(above)
            else:
                self.want_backup(above, urgent=True)

    def _retry(self, span: Span, size: int, *, hopeless: bool) -> None:
        """Soon again, unless it was tried enough or the store takes nothing at the moment."""
        config = self._core.config.write
        if hopeless or span.attempt >= config.max_attempts:
            self._core.counters.write_failed_pages += size
            return
        self._core.counters.write_retried_pages += size
        due = self._core.clock() + config.retry_delay_s * 2 ** (span.attempt - 1)
        self._sequence += 1
        span.tail.named += 1
        heapq.heappush(self._retries, (due, self._sequence, span))

    # ---- shared ---------------------------------------------------------------------------------

    def _size(self, node: Node) -> int:
        """Pages this component has of a node."""
        return 1 if self._is_point else node.num_pages

    def _outcomes(self, op: Operation) -> list[Outcome]:
        """Every node of an operation that has ended, as it is cut now, and what became of it."""
        statuses, at = b"" if op.all_ok() else op.page_statuses(), 0
        outcomes: list[Outcome] = []
        for span in self._spans.pop(op.id):
            for node in [span.tail] if self._is_point else span.nodes():
                size = self._size(node)
                mine = statuses[at : at + size]
                if mine:
                    self._core.count_faults(op.kind, mine)
                outcomes.append((span, node, size, mine))
                at += size
        return outcomes

    def _rest(self, outcomes: list[Outcome]) -> None:
        """Nodes that are like their neighbours now, and that nobody uses, become one."""
        for _, node, _, _ in outcomes:
            self._core.rest(node)


def _joined(spans: Iterable[Span], slot: int) -> PageIds:
    pages = []
    for span in spans:
        holding = span.tail.held[slot]
        assert holding is not None
        pages.append(holding.pages)
    return PageIds(b"".join(pages))
