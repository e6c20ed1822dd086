"""Writes of one component: host → store.

Whatever reaches the host goes to the store. A page that the store did not take is tried again a few
times, and after that by the next request that uses it; one whose prefix the store has lost, with
that prefix. What needs each other is written one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import msgspec

from quire.components import Component, Guard
from quire.manager.core import Core
from quire.manager.operations import ENDED, WRITE, Operation
from quire.manager.writes.stretches import PathStretch, outcomes_of, size_of
from quire.messages import Run, Write
from quire.tree import Node, held_pages, rest, slot_of
from quire.types import (
    HOST,
    NO_PARENT,
    PAGE_KEY_BYTES,
    READY,
    PageIds,
    PageStatus,
    num_pages,
)

MAX_QUEUED_NODES = 1 << 16
INFLIGHT_SHARE = 0.25
"""Share of the host pool that writes in flight may pin: a slow store must not fill the host."""


class Writes:
    def __init__(self, core: Core, component: Component, back_up: Callable[[Node], object]) -> None:
        """`back_up`: the store needs a node that the host lacks."""
        self._core = core
        self._component = component
        self._back_up = back_up
        self._index = component.index
        self._host = slot_of(component.index, HOST)
        self.due: dict[Node, PathStretch] = {}
        """By their lower end."""
        self.retries: list[tuple[float, int, PathStretch]] = []
        """Due time, a number to break ties, and what to write then."""
        self._num_retries = 0
        self._writing: set[Node] = set()
        """On their way to the store, or behind what is."""
        self._behind: dict[Node, list[PathStretch]] = {}
        """By what is being written: what hangs under it, and is written when that has ended."""
        self._inflight_pages = 0
        host = core.allocators[self._host]
        self._max_inflight = max(1, int(host.num_pages * INFLIGHT_SHARE))

    # ---- what becomes due -----------------------------------------------------------------------

    def used(self, tail: Node) -> None:
        """Holes in the store are repaired."""
        epoch, node, index, host = self._core.store_epoch, tail, self._index, self._host
        while (parent := node.parent) is not None:
            stored = node.stored_in(index) if index else node.stored
            if stored != epoch and node.held[host] is not None:
                if node.retention is not None and not node.retention.stored:
                    node.retention = replace(node.retention, stored=True)  # others may have it
                self.want(node)
            node = parent

    def want(self, node: Node) -> None:
        """It goes to the store, unless that has it."""
        core = self._core
        if node.retention is not None and not node.retention.stored:
            return
        if core.store_epoch and core.config.write.enabled and node not in self.due:
            self._queue(PathStretch(node, node.start))

    def _queue(self, stretch: PathStretch) -> None:
        if stretch.tail not in self.due:
            stretch.tail.named += 1
        self.due[stretch.tail] = stretch
        if len(self.due) > MAX_QUEUED_NODES:
            oldest = self._next()
            self._core.counters.write_failed_pages += size_of(self._component, oldest.tail)
            self._let_follow(oldest.tail)

    def _next(self) -> PathStretch:
        stretch = self.due.pop(next(iter(self.due)))
        stretch.tail.named -= 1
        return stretch

    def _next_retry(self) -> PathStretch:
        stretch = heapq.heappop(self.retries)[-1]
        stretch.tail.named -= 1
        return stretch

    @property
    def num_waiting(self) -> int:
        return len(self.due) + len(self._behind) + len(self.retries)

    def flush(self, now: float) -> None:
        while self.retries and self.retries[0][0] <= now:
            self._queue(self._next_retry())
        if self.due:
            if self._core.store_epoch:
                self._start()
            else:
                self._clear_due()

    def clear(self) -> None:
        """Nothing can be written any more."""
        self._clear_due()
        while self.retries:  # or the next retry would stay in the past
            self._next_retry()

    def _clear_due(self) -> None:
        for node in list(self._behind):
            self._let_follow(node)
        while self.due:
            self._next()

    # ---- writing --------------------------------------------------------------------------------

    def _start(self) -> None:
        core = self._core
        stretches: dict[Node, PathStretch] = {}
        guards: list[Guard] = []
        pages: list[bytes] = []
        while self.due and self._inflight_pages < self._max_inflight:
            waiting = self._next()
            for node in waiting.nodes(self._component):
                if node in stretches or node in self._writing:
                    continue
                if not self._is_to_write(node):
                    self._let_follow(node)
                    continue
                if node.parent in self._writing:
                    node.named += 1
                    self._writing.add(node)
                    self._behind.setdefault(node.parent, []).append(waiting.of(node))
                    continue
                stretches[node] = waiting.of(node)
                guards += core.hold(node, self._host)
                pages.append(held_pages(node, self._host))
                self._inflight_pages += size_of(self._component, node)
        if not stretches:
            return
        self._writing.update(stretches)
        host, timeout_s = PageIds(b"".join(pages)), core.config.write.timeout_s
        op = core.operations.start(
            WRITE,
            {self._component.name: num_pages(host)},
            timeout_s=timeout_s * 2,  # the worker gives up first
            on_report=partial(self._reported, list(stretches.values()), core.store_epoch),
            guards=guards,
        )
        core.outbox.append(
            Write(op.id, self._component.name, host, self._runs(stretches), timeout_s)
        )

    def _is_to_write(self, node: Node) -> bool:
        """Is it on the host, and not in the store?"""
        holding = node.held[self._host]
        there = holding is not None and holding.state is READY
        return there and node.stored_in(self._index) != self._core.store_epoch

    def _let_follow(self, node: Node) -> None:
        """What waited for a node's write waits no longer."""
        for stretch in self._behind.pop(node, ()):
            stretch.tail.named -= 1
            self._writing.discard(stretch.tail)
            self._queue(stretch)

    def _runs(self, nodes: Iterable[Node]) -> list[Run]:
        """The names of these nodes' pages; full pages whose keys nobody has needed yet are named by
        their tokens."""
        core, tree = self._core, self._core.tree
        runs: list[Run] = []
        if self._index:
            keys_of = partial(core.keys_of, component=self._component)
            return [Run(keys=keys_of(node), owner=core.owner(node)) for node in nodes]
        before: Node | None = None
        for node in nodes:
            above = node.parent
            assert above is not None
            if node.page_keys is None and above is before and runs[-1].tokens:
                last = runs.pop()
                tokens = last.tokens + node.tokens[last.page_width - last.page_bytes :]
                runs.append(msgspec.structs.replace(last, tokens=tokens))
            else:
                is_first = above.parent is None
                parent = NO_PARENT if is_first else tree.last_key_of(above)
                if node.page_keys is not None:
                    runs.append(Run(parent, node.page_keys, owner=core.owner(node)))
                else:
                    root = tree.root_of(above)
                    seed, tokens = root.digest if is_first else parent, bytes(node.tokens)
                    sizes = root.page_bytes, root.page_width
                    runs.append(Run(parent, b"", seed, tokens, *sizes, core.owner(node)))
            before = node
        return runs

    def _reported(self, stretches: list[PathStretch], epoch: int, op: Operation) -> None:
        """`epoch`: of the store that it wrote to."""
        if op.state is not ENDED:
            return
        core, at = self._core, 0
        outcomes = outcomes_of(core, self._component, op, stretches)
        named = self._index == 0 and len(op.keys) == op.num_pages * PAGE_KEY_BYTES
        for stretch, node, size, statuses in outcomes:
            self._inflight_pages -= size
            self._writing.discard(node)
            if named and node.page_keys is None:
                node.page_keys = op.keys[at * PAGE_KEY_BYTES : (at + size) * PAGE_KEY_BYTES]
            at += size
            if core.has_quotas and not self._index:
                taken = statuses.count(PageStatus.OK) if statuses else size
                core.account(node, written=taken, refused=statuses.count(PageStatus.REJECTED))
            if not any(statuses):
                core.counters.written_pages += size
                node.set_stored(self._index, epoch)
                core.announce_written(node, self._component)
            elif epoch == core.store_epoch:
                if PageStatus.ORPHAN in statuses:
                    self._write_prefix(node)
                again = PathStretch(node, node.start, stretch.attempt + 1)
                self._retry(again, size, hopeless=PageStatus.REJECTED in statuses)
            self._let_follow(node)
        core.finish(op)
        for _, node, _, _ in outcomes:
            rest(core.tree, node)

    def _write_prefix(self, node: Node) -> None:
        """The store has lost what a node hangs under: it is written again, top first."""
        missing = [n for n in self._core.tree.path(node) if n is not node]
        for above in reversed(missing):
            above.set_stored(self._index, 0)
            if above.held[self._host] is not None:
                self.want(above)
            else:
                self._back_up(above)

    def _retry(self, stretch: PathStretch, size: int, *, hopeless: bool) -> None:
        """Soon again, unless it was tried enough or the store takes nothing at the moment."""
        config = self._core.config.write
        if hopeless or stretch.attempt >= config.max_attempts:
            self._core.counters.write_failed_pages += size
            return
        self._core.counters.write_retried_pages += size
        due = self._core.clock() + config.retry_delay_s * 2 ** (stretch.attempt - 1)
        self._num_retries += 1
        stretch.tail.named += 1
        heapq.heappush(self.retries, (due, self._num_retries, stretch))
