"""Intakes: pages of a prefix from a peer (peer → L2), as they are offered.

    offered ──host pages reserved──▶ coming (a Fetch) ──▶ here ──all before it is──▶ in the tree
       ▲                                └──not OK──▶ failed: it may be offered again
       └── no room on the host: tried again at every step

Knows the tree, the allocators and leases; neither peers nor messages between them. Pages may arrive
in any order, and before what lies in front of them, which the request may still be fetching from
its own store: they belong to the intake until they can be put into the tree under what is there.
With several components that is when everything up to the end of the prefix has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.landing import Arrival, land, obstacle
from quire.manager.lease import Lease
from quire.manager.operations import Kind, Operation, OpState
from quire.manager.prefetch import GRACE_S, PrefetchState
from quire.messages import Cancel, Fetch, PeerSource
from quire.tree import Node, slot_of
from quire.types import (
    HOST,
    PAGE_KEY_BYTES,
    OperationId,
    PageIds,
    PageStatus,
    page_array,
    page_ids,
)


@dataclass(slots=True)
class _Offer:
    component: int
    source: PeerSource
    pages: list[int]
    """Of the prefix, ascending without gaps; the first is at source.first."""


@dataclass(slots=True, eq=False)
class _Coming:
    intake: Intake
    component: int
    pages: list[int]
    host: PageIds


@dataclass(slots=True, eq=False)
class Intake:
    lease: Lease
    last: int
    """End of the prefix that is wanted."""
    timeout_s: float
    """For one read."""
    here: list[dict[int, int]]
    """Per component: page of the prefix → host page, arrived and not in the tree yet."""
    offers: deque[_Offer] = field(default_factory=deque)
    """Waiting for room on the host."""
    coming: dict[OperationId, _Coming] = field(default_factory=dict)
    failed: list[tuple[int, PageStatus]] = field(default_factory=list)
    """Pages that did not come, of any component, and why; whoever reads them clears them."""
    num_received: int = 0
    """Pages that have come, of all components."""
    closed: bool = False

    @property
    def complete(self) -> bool:
        """Is everything up to `last` in the tree?"""
        return self.lease.tail.end >= self.last

    @property
    def idle(self) -> bool:
        """Nothing is on its way or waiting to be."""
        return not (self.offers or self.coming)


class Intakes:
    def __init__(
        self, core: Core, costs: CostModel, repoint: Callable[[Lease, Node], None]
    ) -> None:
        """`repoint`: move the end of what a lease protects."""
        self._core = core
        self._costs = costs
        self._repoint = repoint
        self._open: dict[Intake, None] = {}
        self._coming: dict[OperationId, _Coming] = {}

    def open(self, lease: Lease, last: int, timeout_s: float) -> Intake:
        intake = Intake(lease, last, timeout_s, [{} for _ in self._core.components])
        self._open[intake] = None
        return intake

    def offer(
        self, intake: Intake, component: str, first: int, count: int, source: PeerSource
    ) -> None:
        """Pages [first, first + count) can be had at `source`. What is there, or on its way, is
        not fetched again."""
        if intake.closed:
            return
        index = next((c.index for c in self._core.components if c.name == component), None)
        if index is None or count < 1:
            return
        start, end = self._core.components[index].span(0, intake.last)
        known = intake.here[index].keys() | {
            page for c in intake.coming.values() if c.component == index for page in c.pages
        }
        known |= {page for o in intake.offers if o.component == index for page in o.pages}
        run: list[int] = []
        for page in range(max(first, start), min(first + count, end) + 1):
            in_tree = index == 0 and page < intake.lease.tail.end
            if page < min(first + count, end) and page not in known and not in_tree:
                run.append(page)
            elif run:
                at = source.first + run[0] - first
                piece = msgspec.structs.replace(source, first=at)
                intake.offers.append(_Offer(index, piece, run))
                run = []

    def flush(self) -> None:
        """Once per step: fetch what was offered, put into the tree what has come."""
        for intake in self._open:
            if self._core.healthy:
                self._start(intake)
            self._publish(intake)

    def close(self, intake: Intake) -> None:
        """The request ends, or needs no more: what is here and not in the tree is freed, what is
        on its way is stopped, and freed when it has stopped."""
        intake.closed = True
        self._open.pop(intake, None)
        intake.offers.clear()
        for op in intake.coming:
            self._core.outbox.append(Cancel(op))
        for index, here in enumerate(intake.here):
            self._free(index, here.values())
            here.clear()

    @property
    def has_work(self) -> bool:
        return any(intake.offers for intake in self._open)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Host pages owned by intakes, for check_invariants()."""
        index, tier = divmod(slot, 2)
        if tier != HOST:
            return []
        pages = [page_ids(list(intake.here[index].values())) for intake in self._open]
        return pages + [c.host for c in self._coming.values() if c.component == index]

    # ---- fetching -------------------------------------------------------------------------------

    def _start(self, intake: Intake) -> None:
        core = self._core
        while intake.offers:
            offer = intake.offers[0]
            slot = slot_of(offer.component, HOST)
            count = len(offer.pages)
            host = core.reserve(slot, count)
            if host is None:
                count = min(count, core.allocators[slot].num_free)
                host = core.allocators[slot].allocate(count) if count else None
            if host is None:
                core.counters.intake_waits += 1
                return
            self._fetch(intake, offer, count, host)
            if count == len(offer.pages):
                intake.offers.popleft()
            else:
                offer.pages = offer.pages[count:]
                offer.source = msgspec.structs.replace(
                    offer.source, first=offer.source.first + count
                )

    def _fetch(self, intake: Intake, offer: _Offer, count: int, host: PageIds) -> None:
        core, component = self._core, self._core.components[offer.component]
        op = core.operations.start(
            Kind.FETCH,
            {component.name: count},
            now=core.clock(),
            timeout_s=intake.timeout_s + GRACE_S,
            on_report=self._reported,
        )
        coming = _Coming(intake, offer.component, offer.pages[:count], host)
        self._coming[op.id] = intake.coming[op.id] = coming
        key, first = intake.lease.key, offer.pages[0]
        if (end := intake.lease.tail.end) and key.first == 0:
            key.anchor(end, core.tree.keys_of(intake.lease.tail)[-PAGE_KEY_BYTES:])
        keys = key.page_keys(first, first + count)
        core.outbox.append(Fetch(op.id, component.name, keys, host, intake.timeout_s, offer.source))

    def _reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        coming = self._coming.pop(op.id)
        intake = coming.intake
        intake.coming.pop(op.id, None)
        statuses = op.page_statuses()
        if any(statuses):
            self._core.count_faults("peer", statuses)
        else:
            self._costs.observe_peer(len(statuses), self._core.clock() - op.started_s)
        lost: list[int] = []
        hosts = page_array(coming.host).tolist()
        for page, host, status in zip(coming.pages, hosts, statuses, strict=True):
            if intake.closed or status != PageStatus.OK:
                lost.append(host)
                if not intake.closed:
                    intake.failed.append((page, PageStatus(status)))
            else:
                intake.here[coming.component][page] = host
                intake.num_received += 1
                self._core.counters.received_pages += 1
        self._free(coming.component, lost)
        self._core.finish(op)

    # ---- publishing -----------------------------------------------------------------------------

    def _publish(self, intake: Intake) -> None:
        lease = intake.lease
        if not any(intake.here) or lease.private_pages:
            return
        if lease.prefetch is not None and lease.prefetch.state is not PrefetchState.DONE:
            return  # what lies in front is still on its way
        first = lease.tail.end
        for component, here in zip(self._core.components, intake.here, strict=True):
            start = component.span(first, intake.last)[0] if first < intake.last else intake.last
            behind = [page for page in here if page < start]
            self._free(component.index, [here.pop(page) for page in behind])
        last = self._complete_to(intake, first)
        if last <= first:
            return
        pages = []
        for component, here in zip(self._core.components, intake.here, strict=True):
            start, end = component.span(first, last)
            pages.append(page_ids([here.pop(page) for page in range(start, end)]))
        tail = land(self._core, lease.tail, Arrival(lease.key, first, last, pages, 0))
        self._repoint(lease, tail)
        self._core.tidy((tail,))

    def _complete_to(self, intake: Intake, first: int) -> int:
        """Up to which page all that is needed is here and can be put into the tree."""
        if first >= intake.last:
            return first
        here, last = intake.here[0], first
        while last < intake.last and last in here:
            last += 1
        last = min(last, obstacle(self._core, intake.lease.tail, intake.lease.key, last))
        if len(self._core.components) == 1:
            return last
        if last < intake.last:
            return first
        for component in self._core.components[1:]:
            start, end = component.span(first, last)
            if any(page not in intake.here[component.index] for page in range(start, end)):
                return first
        return last

    def _free(self, component: int, hosts: Iterable[int]) -> None:
        pages = page_ids(list(hosts))
        if pages:
            self._core.allocators[slot_of(component, HOST)].free(pages)
