"""Loader: host pages to the device (L2 → L1), for the part of a lease that the host holds.

A node has at most one live load per component; a second request joins it. Failing to allocate
changes nothing: a nearer point to go on from is tried, and the request recomputes the rest. A load
that fails condemns its device pages (DRAINING): they are freed when the last request that counted
on them has let go; whoever only saw them coming lets go at once. With several components it fails
as a whole, since none is of use without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.components import Component, Guard, usable_pages
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import COPY_TIMEOUT_S, Operation, OperationKind, OpState
from quire.manager.states import States
from quire.messages import Load
from quire.tree import NUM_TIERS, Node, held_pages, slot_of
from quire.types import (
    DEVICE,
    DRAINING,
    FILLING,
    HOST,
    READY,
    OperationId,
    PageIds,
    num_pages,
    page_array,
)


@dataclass(slots=True)
class _Span:
    op: Operation
    parts: list[Guard]
    """What it fills, a node each, as (slot, tail, stop): survives splits."""
    waiting: list[Lease] = field(default_factory=list)


@dataclass(slots=True)
class _Needs:
    """What of one component going on after a page needs on the device, and what of it is there."""

    slot: int
    missing: list[Node] = field(default_factory=list)
    """Parents first."""
    size: int = 0
    """Pages of what is missing."""
    movable: int = 0
    """Pages of what is there that only this keeps from being evicted."""
    filling: list[Node] = field(default_factory=list)
    """What somebody else is loading."""
    draining: Node | None = None
    """What cannot be had now, since what the device has of it is condemned."""

    def add(self, node: Node, count: int) -> None:
        holding = node.held[self.slot]
        if holding is None:
            self.missing.insert(0, node)
            self.size += count
        elif holding.state is DRAINING:
            self.draining = node
        else:
            self.movable += 0 if holding.reasons else count
            if holding.state is FILLING:
                self.filling.append(node)


class Loader:
    def __init__(
        self, core: Core, states: States | None, costs: CostModel, condemned: Callable[[], None]
    ) -> None:
        """`condemned`: told when something was."""
        self._core = core
        self._tell_condemned = condemned
        self._costs = costs
        self._states = states
        self._spans: dict[OperationId, _Span] = {}
        self._slots = [slot_of(c.index, DEVICE) for c in core.components]
        self._loaded_by = [
            np.zeros(core.allocators[slot].num_pages, dtype=np.int64) for slot in self._slots
        ]
        """Per component and device page: the load that fills it, or did so last."""
        self._condemned = False
        """Was anything condemned by the report that is being taken in?"""

    def load(self, lease: Lease) -> int:
        """Bring the lease's host pages to the device; returns how many device pages it gained.

        Fewer than the host has when the device has no room for all, or when a page on the way is
        still draining from a failed load.
        """
        if lease.tail is lease.device_tail:
            return 0
        before, limit = lease.num_device, lease.tail.end
        while limit > lease.device_tail.end:
            point = self._point_before(lease, limit)
            if point is None:
                break
            limit = self._try(lease, *point)
        self._core.counters.load_declined_pages += lease.num_host
        return lease.num_device - before

    def forget(self, lease: Lease) -> None:
        """The lease is released: nobody need be told about its loads."""
        for op_id in lease.loads:
            self._spans[op_id].waiting.remove(lease)
        lease.loads.clear()

    # ---- starting -------------------------------------------------------------------------------

    def _point_before(self, lease: Lease, limit: int) -> tuple[Node, int] | None:
        """The deepest page boundary, `limit` at most, from which it could go on, and the node of
        the lease's path in which it lies."""
        core, first = self._core, lease.device_tail.end
        end, node = limit, lease.tail
        if len(self._slots) > 1:  # with full pages alone, all of the lease's path can be used
            path = list(core.tree.path(node, lease.device_tail))
            path.reverse()
            end = usable_pages(core.components, path, first, limit, host=True)
            if end <= first:
                return None
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        return node, end

    def _try(self, lease: Lease, node: Node, end: int) -> int:
        """Make the lease's device part end at page `end`, in `node`. Returns 0 when it does, or the
        boundary before which to try next; nothing was changed then."""
        core, span = self._core, None
        needs = self._needs(lease, node, end)
        for component, need in zip(core.components, needs, strict=True):
            limit = self._limit(component, need, end)
            if limit is not None:
                return min(limit, end - 1)
        if node.end > end:
            node = core.tree.split(node, end - node.start)
            needs = self._needs(lease, node, end)
        if any(need.missing for need in needs):
            # What is there might have to go when room is made for the rest.
            at_risk = any(need.movable for need in needs)
            held = core.protect(node, lease.device_tail) if at_risk else []
            tenant = lease.tenant
            beside = tenant.num_private if tenant is not None else 0
            sizes = [(need.slot, need.size) for need in needs]
            pages = core.reserve_all(sizes, tenant, beside)
            assert pages is not None, "there was less room than it seemed"
            span = self._start(node, needs, pages)
            core.unprotect(held)
        self.enter(lease, node)
        for need in needs:
            for filling in need.filling:
                self._wait(lease, self._span_of(need.slot, filling))
        if span is not None:
            self._wait(lease, span)
        return 0

    def _needs(self, lease: Lease, node: Node, end: int) -> list[_Needs]:
        """By component. Only reads: nothing is split before it is known that all can be had."""
        self._core.tree.stays.catch_up()
        found = []
        for component, slot in zip(self._core.components, self._slots, strict=True):
            need, at = _Needs(slot), node
            # Full pages above the device part are there; other state may be needed from there.
            start = component.span(0 if slot else lease.device_tail.end, end)[0]
            while at.parent is not None and at.end > start:
                need.add(at, 1 if component.is_point else min(at.end, end) - at.start)
                at = at.parent
            found.append(need)
        return found

    def _limit(self, component: Component, need: _Needs, end: int) -> int | None:
        """The boundary before which to try next, if one component's needs for page `end` cannot be
        met: the device has no room for what is missing while what is there stays."""
        core = self._core
        if need.draining is not None:
            return end - 1 if component.is_point else need.draining.start
        if need.missing and not core.healthy:
            return need.missing[0].start if component.index == 0 else 0
        room = core.room(need.slot) - need.movable
        if need.size <= room:
            return None
        core.refused[need.slot] = need.size
        if component.index == 0:
            return need.missing[0].start + room
        # Nearer points need as much of a window, but perhaps not this one's snapshot.
        return end - 1 if component.is_point else 0

    def _start(self, tail: Node, needs: list[_Needs], pages: list[PageIds]) -> _Span:
        core = self._core
        parts: list[Guard] = []
        commands: list[tuple[str, PageIds, PageIds]] = []
        for component, need, target in zip(core.components, needs, pages, strict=True):
            hosts, at = [held_pages(node, need.slot + HOST) for node in need.missing], 0
            for node, host in zip(need.missing, hosts, strict=True):
                core.tree.attach(node, need.slot, PageIds(target[at : at + len(host)]), FILLING)
                parts.append((need.slot, node, node.parent))
                at += len(host)
            if hosts:
                commands.append((component.name, PageIds(b"".join(hosts)), target))
        sources = [(slot + HOST, end, stop) for slot, end, stop in parts]
        op = core.operations.start(
            OperationKind.LOAD,
            {name: num_pages(target) for name, _, target in commands},
            timeout_s=COPY_TIMEOUT_S,
            on_report=self._reported,
            guards=core.protect(tail, tail, sources),
        )
        span = self._spans[op.id] = _Span(op, parts)
        for loaded_by, target in zip(self._loaded_by, pages, strict=True):
            loaded_by[page_array(target)] = op.id
        for name, source, target in commands:
            core.outbox.append(Load(op.id, name, source, target))
        return span

    def enter(self, lease: Lease, tail: Node) -> None:
        """The lease's device part ends at `tail` now; never lets go before it has the new hold."""
        core = self._core
        new = reversed(list(core.tree.path(tail, lease.device_tail)))
        table = b"".join(held_pages(node, DEVICE) for node in new)
        lease.tree_pages = PageIds(lease.tree_pages + table)
        before = lease.device_tail
        lease.end_at(lease.tail, tail)
        if lease.state is not None and self._states is not None:
            self._states.enter(lease.state, tail)
        old, lease.guards = lease.guards, core.protect(lease.tail, tail)
        core.unprotect(old)
        core.tidy((before, tail, lease.tail))

    def _wait(self, lease: Lease, span: _Span) -> None:
        if span.op.id not in lease.loads:
            lease.loads.add(span.op.id)
            span.waiting.append(lease)
            lease.load_state = LoadState.LOADING

    def _span_of(self, slot: int, node: Node) -> _Span:
        """The load that fills it; or that fills what it was split off."""
        page = page_array(held_pages(node, slot))[0]
        return self._spans[OperationId(int(self._loaded_by[slot // NUM_TIERS][page]))]

    # ---- ending ---------------------------------------------------------------------------------

    def _reported(self, op: Operation) -> None:
        if op.state is OpState.RUNNING:
            return
        span = self._spans[op.id]
        arrived = 0
        if op.state is OpState.ENDED:
            together = len(self._slots) > 1
            arrived = op.num_pages * op.all_ok() if together else op.agreed_pages()
        self._condemned = False
        self._settle(span, arrived)
        self._tell(span)
        if op.state is OpState.ENDED:
            del self._spans[op.id]
            self._core.counters.loaded_pages += arrived
            self._costs.observe_load(arrived, op.seconds or self._core.clock() - op.started_s)
            self._core.counters.load_failed_pages += op.num_pages - arrived
            self._core.finish(op)

    def _settle(self, span: _Span, arrived: int) -> None:
        """READY as far as its first pages have arrived, the rest is condemned. With several
        components it is all or nothing."""
        tree, at = self._core.tree, 0
        for slot, tail, stop in span.parts:
            nodes = [tail] if slot in tree.points else list(tree.path(tail, stop))
            for node in reversed(nodes):
                if slot == DEVICE:
                    good_pages, at = arrived - at, at + node.num_pages
                    if 0 < good_pages < node.num_pages:
                        self._settle_node(tree.split(node, good_pages), slot, good=True)
                self._settle_node(node, slot, good=arrived > 0 and at <= arrived)

    def _settle_node(self, node: Node, slot: int, *, good: bool) -> None:
        parent = node.parent
        assert parent is not None
        above, holding = parent.held[slot], node.held[slot]
        if holding is None or holding.state is not FILLING:
            return  # condemned already, when the load was overdue
        # A full page without its prefix is of no use: it shares its parent's fate, also when it
        # has overtaken a parent that is still FILLING (see _condemn).
        if good and (slot != DEVICE or above is None or above.state is not DRAINING):
            self._core.tree.make_ready(node, slot)
            self._core.announce_stored(node, slot)
        else:
            self._condemn(node, slot)

    def _condemn(self, node: Node, slot: int) -> None:
        """Condemn a node and, of full pages, what was loaded below it."""
        self._condemned = True
        for child in list((node.children or {}).values()) if slot == DEVICE else ():
            below = child.held[slot]
            if below is not None and below.state is READY:
                self._condemn(child, slot)
        holding = node.held[slot]
        if holding is None:
            return  # it was of no use without what hung below it
        if holding.state is READY:
            self._core.announce_removed(node, slot)
        self._core.release(self._core.tree.condemn(node, slot))

    def _tell(self, span: _Span) -> None:
        for lease in span.waiting:
            lease.loads.discard(span.op.id)
            if self._condemned and self._lost_something(lease):
                lease.load_state = LoadState.FAILED
            elif not lease.loads and lease.load_state is LoadState.LOADING:
                lease.load_state = LoadState.IDLE
        span.waiting.clear()
        if self._condemned:
            self._tell_condemned()

    def _lost_something(self, lease: Lease) -> bool:
        for component, slot in zip(self._core.components, self._slots, strict=True):
            for node in component.needed(lease.device_tail):
                holding = node.held[slot]
                if holding is not None and holding.state is DRAINING:
                    return True
        return False
