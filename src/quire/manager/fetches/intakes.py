"""Intakes: pages on their way to the host, whoever brings them, until they are in the tree.

    reserved ──sent──▶ coming (a Fetch) ──▶ here ──all before it is──▶ in the tree
                          └──not OK──▶ freed

Knows operations, the tree and the allocators; not who is served first, nor how much may be asked
for. Pages may arrive in any order, and before what lies in front of them: they belong to the intake
until they can be put into the tree, up to the deepest point that can be gone on from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quire.components.base import is_ready
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.counters import Fit
from quire.manager.fetches.base import (
    GRACE_S,
    FetchPiece,
    Intake,
    PageRange,
    PrefetchState,
    point_before,
)
from quire.manager.fetches.landing import Arrival, hindrance, land, obstacle
from quire.manager.fetches.meter import Meter
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import Operation, OperationKind, OpState
from quire.messages import Cancel, Fetch, PeerSource
from quire.tree import NUM_TIERS, Node, Tenant, slot_of
from quire.types import (
    DEVICE,
    HOST,
    OperationId,
    PageIds,
    PageStatus,
    page_array,
    page_ids,
    split_keys,
    tenant_of,
)


class Intakes:
    def __init__(self, core: Core, costs: CostModel, advance: Callable[[Lease], None]) -> None:
        """`advance`: extend a lease to what is there now."""
        self._core = core
        self._advance = advance
        self._from_store = Meter(core.clock, costs.observe_fetch)
        self._from_peers = Meter(core.clock, costs.observe_peer)
        self._open: dict[Intake, None] = {}
        self._by_op: dict[OperationId, Intake] = {}
        self._on_the_way: dict[bytes, Intake] = {}
        """By key: full pages that an operation will bring; and, of the store, that are here and
        wait for what belongs to them."""
        self.fresh: dict[Intake, None] = {}
        """Of peers: something has come, or what lies in front has."""
        self.inflight_pages = 0
        """Full pages on the host that operations hold."""
        self._coming: Counter[str] = Counter()
        """The same by tenant, where quotas are kept."""

    def bringing(self, key: bytes) -> Intake | None:
        """Who brings the full page of this key?"""
        return self._on_the_way.get(key)

    def first_coming(self, key: PrefixKey, first: int, last: int) -> int:
        """The first of these full pages that somebody brings; `last` if nobody brings any."""
        if not self._on_the_way:
            return last
        keys = split_keys(key.page_keys(first, last))
        return next((first + at for at, k in enumerate(keys) if k in self._on_the_way), last)

    @property
    def is_moving(self) -> bool:
        """Is anything on its way that is not overdue?"""
        running = self._core.operations.running
        return any(running[op].state is OpState.RUNNING for op in self._by_op if op in running)

    def is_part(self, op: OperationId) -> bool:
        """Of a stream or a meeting?"""
        intake = self._by_op.get(op)
        return intake is not None and intake.is_part

    def send(
        self, intake: Intake, spans: Sequence[PageRange], source: PeerSource | None = None
    ) -> Fit | None:
        """Have pages brought into host pages that are reserved for them. Returns how these were
        got; None: there is no room, and nothing was changed."""
        core, key = self._core, intake.key
        sizes = [(slot_of(component, HOST), last - first) for component, first, last in spans]
        is_free = all(core.allocators[slot].num_free >= size for slot, size in sizes)
        tenant = core.tenant(key)
        pages = core.reserve_all(sizes, tenant, self.coming_for(tenant))
        if pages is None:
            return None
        op = core.operations.start(
            OperationKind.FETCH,
            {core.components[component].name: last - first for component, first, last in spans},
            timeout_s=intake.timeout_s + GRACE_S,
            on_report=self._reported,
        )
        self._open[intake] = None
        self._by_op[op.id] = intake
        self._meter(intake).begin(op)
        pieces = intake.coming[op.id] = []
        for (component, first, last), host in zip(spans, pages, strict=True):
            hosts = dict(zip(range(first, last), page_array(host).tolist(), strict=True))
            pieces.append(FetchPiece(component, first, last, hosts))
            keys, name = key.page_keys(first, last), core.components[component].name
            fetch = Fetch(op.id, name, keys, host, intake.timeout_s, source, intake.after)
            core.outbox.append(fetch)
            if component == 0:
                self._count(intake, last - first)
                if not intake.is_part:
                    self._on_the_way.update(dict.fromkeys(split_keys(keys), intake))
        return Fit.EXACT if is_free else Fit.EVICTED

    def coming_for(self, tenant: Tenant | None) -> int:
        """Full pages that are reserved for what a tenant wants."""
        return 0 if tenant is None else self._coming[tenant.name]

    def flush(self) -> None:
        """Once per step: put into the tree what has come from peers."""
        fresh, self.fresh = self.fresh, {}
        for intake in fresh:
            if not intake.stopped:
                self.publish(intake)

    def stop(self, intake: Intake) -> None:
        """No more is wanted: what is on its way is stopped, and freed when it has stopped."""
        intake.stopped = True
        intake.offers.clear()
        for op, pieces in intake.coming.items():
            self._core.outbox.append(Cancel(op))
            for piece in pieces:
                self._forget(intake, piece.first, piece.last)

    def take_over(self, old: Intake, new: Intake) -> None:
        """What has come for one of them, and is not in the tree, is the other's."""
        for known, here, theirs in zip(new.known, new.here, old.here, strict=True):
            for page in [page for page in theirs if page < new.last]:
                known[page] = 1
                here[page] = theirs.pop(page)
        if any(new.here):
            self._open[new] = self.fresh[new] = None

    def close(self, intake: Intake) -> None:
        """As `stop`, and what is here and not in the tree is freed."""
        if not intake.stopped:
            self.stop(intake)
        self._open.pop(intake, None)
        for page in intake.here[0]:
            self._forget(intake, page, page + 1)
        for component, here in enumerate(intake.here):
            self.free(component, here.values())
            here.clear()

    def free(self, component: int, hosts: Iterable[int]) -> None:
        self._core.allocators[slot_of(component, HOST)].free(page_ids(list(hosts)))

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Host pages that are neither free nor in the tree, for check_invariants()."""
        index, tier = divmod(slot, NUM_TIERS)
        if tier != HOST:
            return []
        held = [intake.here[index] for intake in self._open]
        held += [piece.hosts for piece in self._pieces() if piece.component == index]
        return [page_ids(list(hosts.values())) for hosts in held]

    def count_inflight(self) -> int:
        """`inflight_pages` from scratch, for check_invariants()."""
        return sum(len(piece.hosts) for piece in self._pieces() if piece.component == 0)

    def _pieces(self) -> list[FetchPiece]:
        return [piece for op, intake in self._by_op.items() for piece in intake.coming[op]]

    # ---- arriving -------------------------------------------------------------------------------

    def _reported(self, op: Operation) -> None:
        intake, core = self._by_op[op.id], self._core
        from_store = intake.lease is None
        if op.state is OpState.ENDED:
            self._unload(intake, op, intake.coming[op.id], final=True)
            del self._by_op[op.id], intake.coming[op.id]
            self._meter(intake).end(op)
            if not op.all_ok():
                core.count_faults(op.kind if from_store else "peer", op.page_statuses())
            core.finish(op)
        elif op.state is OpState.OVERDUE:
            self._meter(intake).forget(op)
        elif not from_store:
            # That of a store is read when it is wanted.
            self._unload(intake, op, intake.coming[op.id], final=False)
        if not from_store:
            self.fresh[intake] = None
        elif op.state is not OpState.RUNNING:
            if intake.on_end is not None and not intake.stopped:
                intake.on_end(intake)
            if not intake.coming:
                core.counters.fetch_missed_pages += intake.last - intake.first

    def _meter(self, intake: Intake) -> Meter:
        return self._from_store if intake.lease is None else self._from_peers

    def take_out(self, intake: Intake) -> None:
        """Take what every rank has out of operations that still run."""
        for op, pieces in intake.coming.items():
            self._unload(intake, self._core.operations.running[op], pieces, final=False)

    def _unload(
        self, intake: Intake, op: Operation, pieces: list[FetchPiece], *, final: bool
    ) -> int:
        """Pages that are OK are here; those that are not, when it is `final`, are freed. Returns
        how many have come."""
        statuses, at, received = op.page_statuses(), 0, 0
        for piece in pieces:
            here, lost, before = intake.here[piece.component], [], len(piece.hosts)
            for page, host in list(piece.hosts.items()):
                status = statuses[at + page - piece.first]
                if status and not final:
                    continue
                del piece.hosts[page]
                if status or intake.stopped:
                    intake.known[piece.component][page] = 0
                    intake.failed.append((page, PageStatus(status)))
                if status or intake.stopped or page in here:  # asked for again before it came
                    lost.append(host)
                else:
                    here[page] = host
                    received += 1
                if piece.component == 0 and (status or intake.lease is not None):
                    self._forget(intake, page, page + 1)
            at += piece.last - piece.first
            self.free(piece.component, lost)
            if piece.component == 0:
                self._count(intake, len(piece.hosts) - before)
        intake.num_received += received
        if intake.lease is not None:
            self._core.counters.received_pages += received
        return received

    def _count(self, intake: Intake, change: int) -> None:
        """So many full pages more are on their way, or less."""
        self.inflight_pages += change
        if self._core.has_quotas:
            self._coming[tenant_of(intake.key.namespace.salt)] += change

    def _forget(self, intake: Intake, first: int, last: int) -> None:
        for key in split_keys(intake.key.page_keys(first, last)):
            if self._on_the_way.get(key) is intake:
                del self._on_the_way[key]

    # ---- publishing -----------------------------------------------------------------------------

    def publish(self, intake: Intake) -> None:
        """Put into the tree what can be used of what has come, and tell those who want it."""
        lease, core = intake.lease, self._core
        if lease is not None:
            prefetch = lease.prefetch
            if prefetch is not None and prefetch.state is not PrefetchState.DONE:
                return  # what lies in front is still on its way
            if lease.private_pages:
                return
            if lease.load_state is LoadState.FAILED:  # it lets go of what it stands on first
                self.fresh[intake] = None
                return
            intake.first = lease.tail.end
            self._drop_behind(intake)
        first, last = intake.first, self.reach(intake)
        anchor = self._anchor(intake) if last > first else None
        last = self._unhindered(intake, anchor, last)
        if anchor is None or last <= first:
            return
        pages = []
        for component, here in zip(core.components, intake.here, strict=True):
            span = range(*component.span(first, last))
            pages.append(page_ids([here.pop(page) for page in span]))
        tail = land(core, anchor, Arrival(intake.key, first, last, pages, intake.epoch))
        self._forget(intake, first, last)
        intake.first = tail.end
        if lease is None:
            core.counters.fetched_pages += tail.end - first
        for prefetch in intake.wanted_by:
            end = min(tail.end, prefetch.first + prefetch.num_fetching)
            if end < tail.end and len(core.components) > 1:
                continue  # the point that was brought is none of its own
            prefetch.num_landed = max(prefetch.num_landed, end - prefetch.first)
        for wanting in [lease] if lease is not None else [p.lease for p in intake.wanted_by]:
            if not wanting.private_pages:
                self._advance(wanting)
        core.tidy((tail,))

    def _unhindered(self, intake: Intake, anchor: Node | None, last: int) -> int:
        """Up to which page, `last` at most, pages can be put into the tree now. Those of a peer
        wait until all can."""
        core, key = self._core, intake.key
        if intake.lease is None:
            return last if anchor is None else self.reach(intake, obstacle(core, anchor, key, last))
        copy = None if anchor is None else hindrance(core, anchor, key, last)
        if copy is not intake.hindered_by:
            intake.hindered_by, intake.hindered_s = copy, core.clock()
        if copy is None:
            return last
        self.fresh[intake] = None
        return intake.first

    def reach(self, intake: Intake, limit: int | None = None) -> int:
        """Up to which page, after those in the tree, all that is needed is here."""
        first, here = intake.first, intake.here
        last = intake.run_here(0, first, intake.last if limit is None else limit)
        if last == first or not all(here):
            return first
        known = [bytes(first) + bytes(page in mine for page in range(first, last)) for mine in here]
        return point_before(self._core.components, known, first, last)

    def _drop_behind(self, intake: Intake) -> None:
        """What others put into the tree meanwhile is not needed again."""
        first, last = intake.first, intake.last
        for component, here in zip(self._core.components, intake.here, strict=True):
            start = component.span(first, last)[0] if first < last else last
            behind = [page for page in here if page < start]
            self.free(component.index, [here.pop(page) for page in behind])

    def _anchor(self, intake: Intake) -> Node | None:
        """What its pages hang under; None: it is gone, or about to go."""
        tree, first = self._core.tree, intake.first
        if intake.lease is not None:
            return intake.lease.tail
        if first == 0:
            return tree.root(intake.key)
        walk = tree.walk(intake.key[:first])
        if walk.num_pages < first or not is_ready(walk.nodes[-1], DEVICE, host=True):
            return None
        return tree.node_at(walk.nodes[-1], first)
