"""Fetches: from the store and from peers to the host (L3, peer → L2). One path, two sources.

What the store is found to have, and what peers offer, stands in one line for one budget, and is
brought by the same intakes. This is the manager's door to all of it.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.line import Line
from quire.manager.fetches.meetings import Meetings
from quire.manager.fetches.offers import Offers
from quire.manager.fetches.prefetches import Prefetches
from quire.manager.fetches.streams import Streams
from quire.manager.lease import Lease
from quire.tree import Node, Tenant
from quire.types import DEVICE, OperationId, PageIds


class Fetches:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        advance: Callable[[Lease], None],
        enter: Callable[[Lease, Node], None],
        let_go: Callable[[], None],
    ) -> None:
        """`advance`: extend a lease to what is there now. `enter`: its device part ends there.
        `let_go`: leases protect no host copies of what has come to the device since."""
        self._intakes = Intakes(core, costs, advance)
        self._line = Line(core.config, self._intakes)
        self.prefetches = Prefetches(core, costs, self._intakes, self._line, advance)
        self.offers = Offers(core, self._intakes, self._line, advance)
        self.streams = Streams(core, costs, self._intakes, self._line, enter=enter, let_go=let_go)
        self.meetings = Meetings(core, costs, self._intakes, self._line, enter)

    def flush(self) -> None:
        """Once per step: what has come enters the tree, what is due goes out."""
        if self._intakes.fresh:
            self._intakes.flush()
        if self.prefetches.put_off:
            self.prefetches.flush()
        if self._line.claims:
            self._line.serve()
        if self.prefetches.probes.queued:
            self.prefetches.probes.flush()

    @property
    def has_work(self) -> bool:
        return bool(self._line.claims or self._intakes.fresh) or self.prefetches.has_work

    @property
    def has_news(self) -> bool:
        """Is anything to be done that waits for nothing?"""
        return bool(self._intakes.fresh) or self.prefetches.has_work

    @property
    def inflight_pages(self) -> int:
        """Full pages on the host that are on their way, and what the budget counts."""
        return self._intakes.inflight_pages

    def release(self, lease: Lease) -> None:
        """A lease ends: nothing more is brought for it."""
        if lease.prefetch is not None:
            self.prefetches.settle(lease.prefetch)
            lease.prefetch = None  # each knows the other: they would wait for a collection
        if lease.intake is not None:
            self.offers.close(lease)
        if lease.stream is not None:
            self.streams.close(lease.stream)
        if lease.meeting is not None:
            self.meetings.close(lease.meeting)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Pages that are neither free nor in the tree nor a lease's, for check_invariants()."""
        held = self._intakes.reserved_pages(slot) + self.streams.reserved_pages(slot)
        return held + self.meetings.reserved_pages() if slot == DEVICE else held

    def is_part(self, op: OperationId) -> bool:
        """Does it go through the host to one request's own pages, where nobody else finds it?"""
        return self._intakes.is_part(op)

    def coming_for(self, tenant: Tenant) -> int:
        """Full pages on the host that are reserved for what a tenant wants."""
        return self._intakes.coming_for(tenant)

    def count_inflight(self) -> int:
        """`inflight_pages` from scratch, for check_invariants()."""
        return self._intakes.count_inflight()
