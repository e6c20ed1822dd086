"""Loader: host pages to the device (L2 → L1), for the part of a lease that the host holds.

A node has at most one live load; a second request joins it. Failing to allocate changes nothing:
the request recomputes. A load that fails condemns its device pages (DRAINING): they are freed
when the last request that counted on them has let go.
"""

from __future__ import annotations

from quire.manager.core import Core
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Load
from quire.tree import Node, slot_of
from quire.types import DEVICE, DRAINING, FILLING, HOST, PAGE_ID_BYTES, READY, OperationId, PageIds

TIMEOUT_S = 60.0


class _Span:
    """What a load fills: nodes from `tail` up to below `stop`; and who waits for it."""

    __slots__ = ("op", "stop", "tail", "waiting")

    def __init__(self, op: Operation, tail: Node, stop: Node) -> None:
        self.op = op
        self.tail = tail
        self.stop = stop
        self.waiting: list[Lease] = []


class Loader:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._spans: dict[OperationId, _Span] = {}
        self._lead = slot_of(core.components[0].index, DEVICE)
        """Components are loaded together: the first one's state stands for all."""

    def load(self, lease: Lease) -> int:
        """Bring the lease's host pages to the device; returns how many device pages it gained.

        Fewer than the host has when the device has no room for all, or when a page on the way is
        still draining from a failed load.
        """
        if lease.tail is lease.device_tail:
            return 0
        before = lease.num_device
        todo: list[Node] = []
        for node in reversed(list(self._core.tree.path(lease.tail, lease.device_tail))):
            holding = node.held[self._lead]
            if holding is None:
                todo.append(node)
            elif holding.state is DRAINING:
                break
            else:  # loaded or being loaded for somebody else
                self._take(lease, node)
                if holding.state is FILLING:
                    self._wait(lease, self._span_of(node))
        found = lease.num_device
        if found > before:
            self._hold(lease)  # before room is made, or what was just found might have to go
        if todo and self._core.healthy:
            self._start(lease, todo)
        if lease.num_device > found:
            self._hold(lease)
        self._core.counters.load_declined_pages += lease.num_host
        return lease.num_device - before

    def _hold(self, lease: Lease) -> None:
        """Protect what the lease uses now; never lets go before it has the new hold."""
        old, lease.guards = lease.guards, self._core.protect(lease.tail)
        self._core.unprotect(old)

    def forget(self, lease: Lease) -> None:
        """The lease is released: nobody need be told about its loads."""
        for op_id in lease.loads:
            self._spans[op_id].waiting.remove(lease)
        lease.loads.clear()

    # ---- starting -------------------------------------------------------------------------------

    def _start(self, lease: Lease, nodes: list[Node]) -> None:
        core, stop = self._core, lease.device_tail
        count = self._reserve(nodes[-1].end - stop.end)
        if count is None:
            return
        size, reserved = count
        tail = self._cut(nodes, stop.end + size)
        path = list(core.tree.path(tail, stop))
        path.reverse()
        host: list[PageIds] = []
        for component, pages in zip(core.components, reserved, strict=True):
            slot = slot_of(component.index, DEVICE)
            for node in path:
                start = (node.start - stop.end) * PAGE_ID_BYTES
                mine = PageIds(pages[start : (node.end - stop.end) * PAGE_ID_BYTES])
                core.tree.attach(node, slot, mine, FILLING)
            host.append(PageIds(b"".join(_pages(node, slot + 1) for node in path)))
        sources = [(slot_of(c.index, HOST), tail, stop) for c in core.components]
        op = core.operations.start(
            Kind.LOAD,
            size,
            now=core.clock(),
            timeout_s=TIMEOUT_S,
            on_report=self._reported,
            guards=core.protect(tail, sources),
        )
        span = self._spans[op.id] = _Span(op, tail, stop)
        for component, source, target in zip(core.components, host, reserved, strict=True):
            core.outbox.append(Load(op.id, component.name, source, target))
        for node in path:
            self._take(lease, node)
        self._wait(lease, span)

    def _reserve(self, count: int) -> tuple[int, list[PageIds]] | None:
        """Device pages for `count` pages of every component, or for as many as can be had."""
        core = self._core
        slots = [slot_of(c.index, DEVICE) for c in core.components]
        taken = [core.reserve(slot, count) for slot in slots]
        if any(pages is None for pages in taken):
            for slot, pages in zip(slots, taken, strict=True):
                core.allocators[slot].free(pages or PageIds(b""))
            count = min(count, *(core.allocators[slot].num_free for slot in slots))
            taken = [core.allocators[slot].allocate(count) if count else None for slot in slots]
        if any(pages is None for pages in taken):
            for slot, pages in zip(slots, taken, strict=True):
                core.allocators[slot].free(pages or PageIds(b""))
            return None
        return count, [pages for pages in taken if pages is not None]

    def _cut(self, nodes: list[Node], end: int) -> Node:
        """The node that ends at page `end`, split off if none does."""
        for node in nodes:
            if node.end == end:
                return node
            if node.end > end:
                return self._core.tree.split(node, end - node.start)
        raise AssertionError("the cut lies beyond the nodes")

    def _take(self, lease: Lease, node: Node) -> None:
        lease.tree_pages = PageIds(lease.tree_pages + _pages(node, self._lead))
        lease.device_tail = node

    def _wait(self, lease: Lease, span: _Span) -> None:
        if span.op.id not in lease.loads:
            lease.loads.add(span.op.id)
            span.waiting.append(lease)
            lease.load_state = LoadState.LOADING

    def _span_of(self, node: Node) -> _Span:
        for span in self._spans.values():
            if any(at is node for at in self._core.tree.path(span.tail, span.stop)):
                return span
        raise AssertionError(f"{node} is FILLING without a load")

    # ---- ending ---------------------------------------------------------------------------------

    def _reported(self, op: Operation) -> None:
        if op.state is OpState.RUNNING:
            return
        span = self._spans[op.id]
        arrived = op.agreed_pages() if op.state is OpState.ENDED else 0
        self._settle(span, span.stop.end + arrived)
        self._tell(span)
        if op.state is OpState.ENDED:
            del self._spans[op.id]
            self._core.counters.loaded_pages += arrived
            self._core.counters.load_failed_pages += op.num_pages - arrived
            self._core.finish(op)

    def _settle(self, span: _Span, good_end: int) -> None:
        """Pages before `good_end` become READY, the rest of the span is condemned."""
        tree = self._core.tree
        for node in reversed(list(tree.path(span.tail, span.stop))):
            if node.start < good_end < node.end:
                self._settle_node(tree.split(node, good_end - node.start), good=True)
            self._settle_node(node, good=node.end <= good_end)

    def _settle_node(self, node: Node, *, good: bool) -> None:
        parent = node.parent
        assert parent is not None
        for component in self._core.components:
            slot = slot_of(component.index, DEVICE)
            above, holding = parent.held[slot], node.held[slot]
            if holding is None or holding.state is not FILLING:
                continue  # condemned already, when the load was overdue
            # A page without its prefix is of no use: it shares its parent's fate, also when it
            # has overtaken a parent that is still FILLING (see _condemn).
            if good and (above is None or above.state is not DRAINING):
                self._core.tree.make_ready(node, slot)
                self._core.stored(node, slot)
            else:
                self._condemn(node, slot)

    def _condemn(self, node: Node, slot: int) -> None:
        """Condemn a node and what was loaded below it."""
        for child in list((node.children or {}).values()):
            below = child.held[slot]
            if below is not None and below.state is READY:
                self._condemn(child, slot)
        holding = node.held[slot]
        if holding is not None and holding.state is READY:
            self._core.removed(node, slot)
        self._core.release(self._core.tree.condemn(node, slot))

    def _tell(self, span: _Span) -> None:
        for lease in span.waiting:
            lease.loads.discard(span.op.id)
            states = {
                holding.state
                for node in self._core.tree.path(lease.device_tail)
                if (holding := node.held[self._lead]) is not None
            }
            if DRAINING in states:
                lease.load_state = LoadState.FAILED
            elif not lease.loads and lease.load_state is LoadState.LOADING:
                lease.load_state = LoadState.IDLE
        span.waiting.clear()


def _pages(node: Node, slot: int) -> PageIds:
    holding = node.held[slot]
    assert holding is not None
    return holding.pages
