"""Streams: a hit larger than the free host goes through it in parts (L3 → L2 → L1).

    asked for ──its turn──▶ fetched to a few host pages ──▶ loaded to the device ──▶ host pages free

Begins when a request has its device pages, all of them, and the store was found to have more than
the host had room for. The device pages belong to the stream until its end; then as much as has come
in full enters the tree, and the lease goes on from there. What has not come is computed: a part
that fails, or comes short, is the last. With several components the state at the end comes with the
first part, since without it the rest is of no use; and it is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.counters import Decline
from quire.manager.fetches.base import Intake, PageRange, Stream, point_before
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.landing import Arrival, land, obstacle
from quire.manager.fetches.line import Line, Turn
from quire.manager.fetches.parts import Parts
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import Operation, OpState
from quire.tree import NUM_TIERS, Node, slot_of
from quire.types import DEVICE, HOST, PAGE_ID_BYTES, PageIds, num_pages

PART_PAGES = 64
"""Full pages in a part, at most: so much of the host a stream holds, twice, while one part is
fetched and the one before it is loaded."""


class Streams:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        intakes: Intakes,
        line: Line,
        *,
        enter: Callable[[Lease, Node], None],
        let_go: Callable[[], None],
    ) -> None:
        self._core = core
        self._costs = costs
        self._intakes = intakes
        self._line = line
        self._parts = Parts(core, intakes)
        self._enter = enter
        self._let_go = let_go
        self._open: dict[Stream, None] = {}

    def start(self, lease: Lease) -> bool:
        """Begin to bring what the store has after the lease's device part. False: there is no more
        to be had, or it is not worth it; nothing was changed."""
        core, first, prefetch = self._core, lease.num_device, lease.prefetch
        last = self._reach(lease)
        if prefetch is None or last <= first:
            return False
        least = 1 if prefetch.num_landed else core.config.threshold_pages
        ahead = self._intakes.inflight_pages
        if last - first < least or not self._costs.worth_fetching(last - first, ahead):
            return False
        spans = [component.span(first, last) for component in core.components[1:]]
        others = core.reserve_all(
            [(slot_of(c, DEVICE), end - start) for c, (start, end) in enumerate(spans, start=1)],
            lease.tenant,
        )
        if others is None:
            return False
        cut = (last - first) * PAGE_ID_BYTES
        full = PageIds(lease.private_pages[:cut])
        lease.keep(PageIds(lease.private_pages[cut:]))
        pages = [full, *others]
        stream = Stream(lease, first, last, core.store_epoch, pages, first, last, core.clock())
        lease.stream = stream
        self._open[stream] = None
        core.counters.streams += 1
        self._line.join(lease.key, partial(self._serve, stream))
        return True

    def close(self, stream: Stream) -> None:
        """Its lease ends, or waits no longer: what it holds is freed when nothing uses it."""
        stream.lease.stream = None
        if stream.intake is not None:
            self._intakes.close(stream.intake)
        self._free_if_unused(stream)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Device pages that streams own, for check_invariants()."""
        index, tier = divmod(slot, NUM_TIERS)
        return [stream.device[index] for stream in self._open] if tier == DEVICE else []

    def _reach(self, lease: Lease) -> int:
        """Up to which point the store has what the host had no room for."""
        prefetch, first, core = lease.prefetch, lease.num_device, self._core
        if prefetch is None or not prefetch.is_cut or lease.num_host or not core.healthy:
            return 0
        if prefetch.declined not in (None, Decline.HOST_FULL, Decline.NO_SLOT, Decline.BUDGET):
            return 0
        # What was fetched must have come: if it was not waited for, the rest is not either.
        if prefetch.first + prefetch.num_fetching > first or not core.store_epoch:
            return 0
        limit = min(prefetch.first + prefetch.num_hit, first + num_pages(lease.private_pages))
        return point_before(core.components, prefetch.known, first, max(first, limit))

    # ---- part by part ---------------------------------------------------------------------------

    def _serve(self, stream: Stream) -> Turn:
        """Its turn: ask for the next part, as large as there is room for."""
        core, at, key = self._core, stream.next, stream.lease.key
        if stream.closed:
            return Turn.SERVED
        if at >= stream.end or not core.healthy or core.store_epoch != stream.epoch:
            self._end(stream)
            return Turn.SERVED
        count = min(stream.last - at, PART_PAGES, self._line.allowance(key, at))
        if count <= 0:
            return Turn.WAITS if self._line.is_spent else Turn.PASSES
        last = at + min(count, core.room(HOST))
        part = self._parts.new(key, at, last, stream.epoch, stream.last)
        part.on_end = partial(self._arrived, stream)
        if last == at or self._intakes.send(part, self._spans(stream, at, last)) is None:
            return self._wait_for_room(stream, part.timeout_s)
        stream.intake, stream.next, stream.moved_s = part, last, core.clock()
        return Turn.SERVED

    def _wait_for_room(self, stream: Stream, timeout_s: float) -> Turn:
        busy = stream.loading or stream.lease.loads  # these will make room
        if not busy and not stream.lets_go:
            stream.lets_go = True
            self._let_go()
        if busy or self._core.clock() < stream.moved_s + timeout_s:
            return Turn.PASSES
        self._end(stream)
        return Turn.SERVED

    def _spans(self, stream: Stream, first: int, last: int) -> list[PageRange]:
        """Of the part [first, last): its full pages and, in the first part, the state that belongs
        to the end of the stream."""
        others = self._core.components[1:] if first == stream.first else []
        state = [(c.index, *c.span(stream.first, stream.last)) for c in others]
        return [(0, first, last), *state]

    def _arrived(self, stream: Stream, part: Intake) -> None:
        """A part has come to the host, in full or not, or is overdue."""
        first = part.first
        self._parts.take(part)
        stream.intake = None
        for component, start, end in self._spans(stream, first, part.last):
            reached = part.run_here(component, start, end)
            if component == 0:
                part.first = reached
            if reached < end:
                self._cut(stream, reached)
        if stream.end > first:
            self._load(stream, part, self._spans(stream, first, part.first))
        else:
            self._intakes.close(part)
        if stream.next >= stream.end:
            self._end(stream)
        else:
            self._line.join(stream.lease.key, partial(self._serve, stream))

    def _cut(self, stream: Stream, page: int) -> None:
        """It cannot go beyond this page; nowhere, if without its state nothing is of use."""
        plain = len(self._core.components) == 1
        stream.end = min(stream.end, page if plain else stream.first)

    def _load(self, stream: Stream, part: Intake, spans: list[PageRange]) -> None:
        targets = []
        for span in spans:
            index, start, end = span
            origin = self._core.components[index].span(stream.first, stream.last)[0]
            cut = slice((start - origin) * PAGE_ID_BYTES, (end - origin) * PAGE_ID_BYTES)
            targets.append((span, PageIds(stream.device[index][cut])))
        stream.loading[self._parts.load(part, targets, partial(self._loaded, stream))] = part

    def _loaded(self, stream: Stream, op: Operation) -> None:
        if op.state is OpState.OVERDUE and not stream.closed:
            self.close(stream)
        if op.state is not OpState.ENDED:
            return
        part = stream.loading.pop(op.id)
        if not op.all_ok():
            start = part.first - op.num_pages  # its full pages end at `part.first`
            self._cut(stream, start + op.agreed_pages())
        self._parts.loaded(part, op)
        if stream.closed:
            self._free_if_unused(stream)
        elif stream.next >= stream.end:
            self._end(stream)

    # ---- ending ---------------------------------------------------------------------------------

    def _end(self, stream: Stream) -> None:
        """Ask for no more; when all that was asked for is settled, the lease goes on."""
        stream.end = min(stream.end, stream.next)
        part = stream.intake
        if part is not None and stream.end <= part.first:
            self._intakes.close(part)
            stream.intake = None
        busy = stream.loading or stream.intake is not None or stream.closed
        if not busy and self._settle(stream) is not Turn.SERVED:
            self._line.join(stream.lease.key, partial(self._settle, stream))

    def _settle(self, stream: Stream) -> Turn:
        core, lease, first = self._core, stream.lease, stream.first
        if stream.closed:
            return Turn.SERVED
        if lease.loads:  # what lies in front is still on its way
            return Turn.PASSES
        reached = obstacle(core, lease.device_tail, lease.key, stream.end, DEVICE)
        is_short = len(core.components) > 1 and reached < stream.last
        if is_short or lease.load_state is LoadState.FAILED:
            reached = first
        cut = (reached - first) * PAGE_ID_BYTES
        full, lease.stream = stream.device[0], None
        lease.keep(PageIds(full[cut:] + lease.private_pages))
        stream.device[0] = PageIds(full[:cut])
        if reached == first:
            self._free_if_unused(stream)
            return Turn.SERVED
        del self._open[stream]
        arrival = Arrival(lease.key, first, reached, stream.device, stream.epoch, DEVICE)
        tail = land(core, lease.device_tail, arrival)
        core.counters.streamed_pages += tail.end - first
        self._enter(lease, tail)
        return Turn.SERVED

    def _free_if_unused(self, stream: Stream) -> None:
        if not stream.loading:
            del self._open[stream]
            for component, pages in enumerate(stream.device):
                self._core.allocators[slot_of(component, DEVICE)].free(pages)
