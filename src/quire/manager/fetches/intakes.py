"""Intakes: pages on their way to the host, whoever brings them, until they are in the tree.

    reserved ──sent──▶ coming (a Fetch) ──▶ here ──all before it is──▶ in the tree
                          └──not OK──▶ freed

Knows operations, the tree and the allocators; not who is served first, nor how much may be asked
for. Pages may arrive in any order, and before what lies in front of them: they belong to the intake
until they can be put into the tree, up to the deepest point that can be gone on from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.fetches.base import GRACE_S, Intake, Piece, PrefetchState, point_before
from quire.manager.fetches.landing import Arrival, is_hindered, land, obstacle
from quire.manager.lease import Lease
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Cancel, Fetch, PeerSource
from quire.tree import NUM_TIERS, Node, slot_of
from quire.types import (
    HOST,
    NO_SLOT,
    PAGE_KEY_BYTES,
    OperationId,
    PageIds,
    PageStatus,
    num_pages,
    page_array,
    page_ids,
    split_keys,
)


class Intakes:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        advance: Callable[[Lease], None],
        ended: Callable[[Intake], None],
    ) -> None:
        """`advance`: extend a lease to what is there now. `ended`: told when what was sent for an
        intake of the store has come, or not, or is overdue."""
        self._core = core
        self._costs = costs
        self._advance = advance
        self._ended = ended
        self._open: dict[Intake, None] = {}
        self._by_op: dict[OperationId, Intake] = {}
        self._on_the_way: dict[bytes, Intake] = {}
        """By key: full pages that an operation will bring; and, of the store, that are here and
        wait for what belongs to them."""
        self.fresh: dict[Intake, None] = {}
        """Of peers: something has come, or what lies in front has."""
        self.inflight_pages = 0
        """Full pages on the host that operations hold."""

    def open(self, intake: Intake) -> Intake:
        self._open[intake] = None
        return intake

    def bringing(self, key: bytes) -> Intake | None:
        """Who brings the full page of this key?"""
        return self._on_the_way.get(key)

    def first_coming(self, key: PrefixKey, first: int, last: int) -> int:
        """The first of these full pages that somebody brings; `last` if nobody brings any."""
        if not self._on_the_way:
            return last
        keys = split_keys(key.page_keys(first, last))
        return next((first + at for at, k in enumerate(keys) if k in self._on_the_way), last)

    def send(
        self,
        intake: Intake,
        spans: Sequence[tuple[int, int]],
        pages: Sequence[PageIds],
        source: PeerSource | None = None,
    ) -> None:
        """Have pages brought: for each (component, first page) into so many host pages."""
        core, key = self._core, intake.key
        names = [core.components[component].name for component, _ in spans]
        op = core.operations.start(
            Kind.FETCH,
            {name: num_pages(host) for name, host in zip(names, pages, strict=True)},
            now=core.clock(),
            timeout_s=intake.timeout_s + GRACE_S,
            on_report=self._reported,
        )
        pieces = intake.coming[op.id] = []
        self._by_op[op.id] = intake
        for name, (component, first), host in zip(names, spans, pages, strict=True):
            keys = key.page_keys(first, first + num_pages(host))
            pieces.append(Piece(component, first, page_array(host).tolist(), keys))
            core.outbox.append(Fetch(op.id, name, keys, host, intake.timeout_s, source))
            if component == 0:
                if intake.stream is None:
                    self._on_the_way.update(dict.fromkeys(split_keys(keys), intake))
                intake.num_coming += num_pages(host)
                self.inflight_pages += num_pages(host)

    def flush(self) -> None:
        """Once per step: put into the tree what has come from peers."""
        fresh, self.fresh = self.fresh, {}
        for intake in fresh:
            if not intake.closed:
                self.publish(intake)

    def close(self, intake: Intake) -> None:
        """No more is wanted: what is here and not in the tree is freed, what is on its way is
        stopped, and freed when it has stopped."""
        intake.closed = True
        self._open.pop(intake, None)
        intake.offers.clear()
        for op, pieces in intake.coming.items():
            self._core.outbox.append(Cancel(op))
            for piece in pieces:
                self._forget(intake, piece.keys)
        for page in intake.here[0] if intake.lease is None else ():
            self._forget(intake, intake.key.page_keys(page, page + 1))
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
        here = [page_ids(list(intake.here[index].values())) for intake in self._open]
        pieces = [p for op, intake in self._by_op.items() for p in intake.coming[op]]
        coming = [[h for h in p.hosts if h != NO_SLOT] for p in pieces if p.component == index]
        return here + [page_ids(hosts) for hosts in coming]

    def count_inflight(self) -> int:
        """`inflight_pages` from scratch, for check_invariants()."""
        pieces = [p for op, intake in self._by_op.items() for p in intake.coming[op]]
        return sum(len(p.hosts) - p.hosts.count(NO_SLOT) for p in pieces if not p.component)

    # ---- arriving -------------------------------------------------------------------------------

    def _reported(self, op: Operation) -> None:
        intake = self._by_op[op.id]
        from_store = intake.lease is None
        if op.state is OpState.RUNNING:
            if not from_store:  # that of a store is read when it is wanted
                self._unload(intake, op, intake.coming[op.id], final=False)
                self.fresh[intake] = None
            return
        if op.state is OpState.ENDED:
            pieces = intake.coming[op.id]
            received = self._unload(intake, op, pieces, final=True)
            del self._by_op[op.id], intake.coming[op.id]
            if not op.all_ok():
                self._core.count_faults(op.kind if from_store else "peer", op.page_statuses())
            observe = self._costs.observe_fetch if from_store else self._costs.observe_peer
            observe(received, self._core.clock() - op.started_s)
            self._core.finish(op)
        if not from_store:
            self.fresh[intake] = None
            return
        if not intake.closed:
            self._ended(intake)
        if not intake.coming:
            missed = intake.num_wanted - intake.num_landed
            self._core.counters.fetch_missed_pages += missed

    def take_out(self, intake: Intake) -> None:
        """Take what every rank has out of operations that still run."""
        for op, pieces in intake.coming.items():
            self._unload(intake, self._core.operations.running[op], pieces, final=False)

    def _unload(self, intake: Intake, op: Operation, pieces: list[Piece], *, final: bool) -> int:
        """Pages that are OK are here; those that are not, when it is `final`, are freed. Returns
        how many have come."""
        statuses, at, received = op.page_statuses(), 0, 0
        for piece in pieces:
            here, lost, num_gone = intake.here[piece.component], [], 0
            gone: list[bytes] = []
            for index, host in enumerate(piece.hosts):
                page, status = piece.first + index, statuses[at + index]
                if host == NO_SLOT or (status and not final):
                    continue
                if status or intake.closed:
                    lost.append(host)
                    intake.known[piece.component][page] = 0
                    intake.failed.append((page, PageStatus(status)))
                elif page in here:  # it was asked for again before it came
                    lost.append(host)
                else:
                    here[page] = host
                    received += 1
                piece.hosts[index] = NO_SLOT
                if piece.component == 0:
                    num_gone += 1
                    if status or intake.lease is not None:
                        key_at = index * PAGE_KEY_BYTES
                        gone.append(piece.keys[key_at : key_at + PAGE_KEY_BYTES])
            at += len(piece.hosts)
            self.free(piece.component, lost)
            self._forget(intake, b"".join(gone))
            intake.num_coming -= num_gone
            self.inflight_pages -= num_gone
        intake.num_received += received
        if intake.lease is not None:
            self._core.counters.received_pages += received
        return received

    def _forget(self, intake: Intake, keys: bytes) -> None:
        for key in split_keys(keys):
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
            intake.first, intake.hindered = lease.tail.end, False
            self._drop_behind(intake)
        first, anchor = intake.first, None
        last = self.reach(intake)
        if last > first and (anchor := self._anchor(intake)) is not None:
            unhindered = obstacle(core, anchor, intake.key, last)
            if lease is not None:
                intake.hindered = unhindered < last or is_hindered(core, anchor, intake.key, last)
                if intake.hindered:
                    self.fresh[intake] = None
                    return
            last = self.reach(intake, unhindered)
        if anchor is None or last <= first:
            return
        pages = []
        for component, here in zip(core.components, intake.here, strict=True):
            span = range(*component.span(first, last))
            pages.append(page_ids([here.pop(page) for page in span]))
        tail = land(core, anchor, Arrival(intake.key, first, last, pages, intake.epoch))
        self._forget(intake, intake.key.page_keys(first, last))
        intake.first = tail.end
        intake.num_landed += tail.end - first
        if lease is None:
            core.counters.fetched_pages += tail.end - first
        for prefetch in intake.wanted_by:
            end = min(tail.end, prefetch.first + prefetch.num_fetching)
            if end < tail.end and len(core.components) > 1:
                continue  # the point that was brought is none of its own
            prefetch.num_landed = max(prefetch.num_landed, end - prefetch.first)
        for wanting in intake.leases:
            if not wanting.released and not wanting.private_pages:
                self._advance(wanting)
        core.tidy((tail,))

    def reach(self, intake: Intake, limit: int | None = None) -> int:
        """Up to which page, after those in the tree, all that is needed is here."""
        first, here = intake.first, intake.here
        last, limit = first, intake.last if limit is None else limit
        while last < limit and last in here[0]:
            last += 1
        if last == first or not all(here):
            return first
        present = [bytes(page in mine for page in range(first, last)) for mine in here[1:]]
        return point_before(self._core.components, present, first, last)

    def _drop_behind(self, intake: Intake) -> None:
        """What others put into the tree meanwhile is not needed again."""
        first, last = intake.first, intake.last
        for component, here in zip(self._core.components, intake.here, strict=True):
            start = component.span(first, last)[0] if first < last else last
            behind = [page for page in here if page < start]
            self.free(component.index, [here.pop(page) for page in behind])

    def _anchor(self, intake: Intake) -> Node | None:
        """What its pages hang under; None: it is gone."""
        tree, first = self._core.tree, intake.first
        if intake.lease is not None:
            return intake.lease.tail
        if first == 0:
            return tree.root(intake.key)
        walk = tree.walk(intake.key[:first])
        if walk.num_pages < first:
            return None
        node = walk.nodes[-1]
        return node if node.end == first else tree.split(node, first - node.start)
