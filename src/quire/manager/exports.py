"""Exports: lets peers read pages of a prefix (L2 → peer), as they become READY on the host.

    wanted ──READY on the host──▶ granted (a Serve operation, its pages locked) ──closed──▶ ended
       └─only on the device: a backup is demanded, whatever the write policy

Knows the tree and the writers; neither peers nor messages between them. A grant is an operation: it
ends, and its pages may go, only when every rank says that nobody reads them any more.

With several components the state at the end of the prefix belongs to it: the window behind it and
the snapshot at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from quire.components import Component, Guard
from quire.components.base import is_ready
from quire.manager.core import Core
from quire.manager.lease import Lease
from quire.manager.operations import Operation, OperationKind, OpState
from quire.messages import Cancel, Serve
from quire.tree import Node, held_pages, slot_of
from quire.types import DEVICE, HOST, PAGE_ID_BYTES, OperationId, PageIds

SERVE_TIMEOUT_S = 3600.0
"""Whoever opened an export closes it much sooner."""


@dataclass(frozen=True, slots=True)
class ReadablePages:
    """Pages [first, first + count) of a component can be read as indices 0, 1, … of `op`."""

    op: OperationId
    component: str
    first: int
    count: int


@dataclass(slots=True)
class _Wanted:
    component: Component
    next: int
    end: int


@dataclass(slots=True, eq=False)
class Export:
    """Pages of one prefix for one peer; `last` is the end of the prefix."""

    last: int
    wanted: list[_Wanted] = field(default_factory=list)
    grants: list[OperationId] = field(default_factory=list)
    closed: bool = False

    @property
    def complete(self) -> bool:
        """Has everything that was asked for been granted?"""
        return not self.wanted


class Exports:
    def __init__(self, core: Core, demand: Callable[[int, Node], None]) -> None:
        """`demand(component, node)`: have the device's copy of it backed up."""
        self._core = core
        self._demand = demand

    def open(self, first: int, last: int) -> Export:
        """Begin to let a peer read pages [first, last) of a prefix; see `grant`."""
        export = Export(last)
        self.repair(export, first, last)
        return export

    def repair(self, export: Export, first: int, last: int) -> None:
        """Pages [first, last) are wanted (again), and the state at the end that this asks for."""
        for component in self._core.components:
            end = last if component.index == 0 else export.last
            wanted = _Wanted(component, *component.span(first, end))
            if wanted.next < wanted.end:
                export.wanted.append(wanted)

    def skip(self, export: Export, first: int) -> int:
        """Full pages before `first` are not wanted any more; those that were granted stay so.
        Returns how many will not be granted."""
        skipped = 0
        for wanted in export.wanted:
            if wanted.component.index == 0:
                until = min(max(wanted.next, first), wanted.end)
                skipped += until - wanted.next
                wanted.next = until
        export.wanted = [wanted for wanted in export.wanted if wanted.next < wanted.end]
        return skipped

    def grant(self, export: Export, lease: Lease) -> list[ReadablePages]:
        """What of an export can be read from now on. `lease` holds the prefix, or so much of it as
        has been computed; call it again after every step until the export is complete."""
        lease.require_live()
        tail = lease.tail
        if export.closed or not self._core.healthy:
            return []
        grants: list[ReadablePages] = []
        for wanted in export.wanted:
            # Other state than `full` is of use only at the end of the prefix.
            if wanted.component.index == 0 or tail.end == export.last:
                grants += self._advance(export, wanted, tail)
        export.wanted = [wanted for wanted in export.wanted if wanted.next < wanted.end]
        return grants

    def is_on_host(self, lease: Lease) -> bool:
        """Has the host all of the prefix that a lease holds, so that the device may let it go?"""
        core, tail = self._core, lease.tail
        if not self._has_path(tail):
            return False
        return all(
            is_ready(node, slot_of(component.index, HOST), host=False)
            for component in core.components[1:]
            for node in component.needed(tail)
        )

    def close(self, export: Export) -> None:
        """The peer needs it no longer."""
        export.closed = True
        for op in export.grants:
            if op in self._core.operations.running:
                self._core.outbox.append(Cancel(op))
        export.grants.clear()
        export.wanted.clear()

    def _advance(self, export: Export, wanted: _Wanted, tail: Node) -> list[ReadablePages]:
        core, component, first = self._core, wanted.component, wanted.next
        host, device = slot_of(component.index, HOST), slot_of(component.index, DEVICE)
        path = [n for n in core.tree.path(tail) if n.end > first and n.start < wanted.end]
        if component.is_point:
            path = [node for node in path if node.end == wanted.end]
        path.reverse()
        run = list(takewhile(lambda node: is_ready(node, host, host=False), path))
        for node in path[len(run) :]:
            if node.held[host] is None and is_ready(node, device, host=False):
                self._demand(component.index, node)
        if not run:
            return []
        wanted.next = min(run[-1].end, wanted.end)
        count = wanted.next - first
        skip = 0 if component.is_point else (first - run[0].start) * PAGE_ID_BYTES
        pages = b"".join(held_pages(node, host) for node in run)
        op = core.operations.start(
            OperationKind.SERVE,
            {component.name: count},
            timeout_s=SERVE_TIMEOUT_S,
            on_report=self._reported,
            guards=core.lock(self._kept(host, run)),
        )
        served = PageIds(pages[skip : skip + count * PAGE_ID_BYTES])
        core.outbox.append(Serve(op.id, component.name, served))
        export.grants.append(op.id)
        core.counters.exported_pages += count
        return [ReadablePages(op.id, component.name, first, count)]

    def _kept(self, host: int, run: list[Node]) -> list[Guard]:
        """What must stay while a run of nodes is read from a pool of the host: that, and the path
        to it, on the host if it has all of it. Then the device need not."""
        core, tail = self._core, run[-1]
        if not self._has_path(tail):
            return [(host, tail, run[0].parent), *core.components[0].protection(tail)]
        path: list[Guard] = [(HOST, tail, None)]
        return path if host == HOST else [(host, tail, run[0].parent), *path]

    def _has_path(self, tail: Node) -> bool:
        return all(is_ready(node, HOST, host=False) for node in self._core.tree.path(tail))

    def _reported(self, op: Operation) -> None:
        if op.state is OpState.ENDED:
            self._core.finish(op)
