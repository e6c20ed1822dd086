"""Streams: a hit larger than the free host goes through it in parts (L3 → L2 → L1).

    asked for ──its turn──▶ fetched to a few host pages ──▶ loaded to the device ──▶ host pages free

Begins when a request has its device pages, all of them, and the store was found to have more than
the host had room for. The device pages belong to the stream until its end; then as much as has come
in full enters the tree, and the lease goes on from there. What has not come is computed: a part
that fails, or comes short, is the last. With several components the state at the end comes first,
since without it the rest is of no use; and it is all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.counters import Decline
from quire.manager.fetches.base import Intake, Stream, point_before
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.landing import Arrival, land, obstacle
from quire.manager.fetches.line import Line, Turn
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Load
from quire.tree import NUM_TIERS, Node, slot_of
from quire.types import (
    DEVICE,
    HOST,
    PAGE_ID_BYTES,
    OperationId,
    PageIds,
    num_pages,
    page_ids,
)

PART_PAGES = 64
"""Full pages in a part, at most: so much of the host a stream holds, twice, while one part is
fetched and the one before it is loaded."""
LOAD_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Loading:
    """A part that is copied to the device: per component, its first page and its host pages."""

    stream: Stream
    spans: list[tuple[int, int, list[int]]]


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
        self._enter = enter
        self._let_go = let_go
        self._open: dict[Stream, None] = {}
        self._loading: dict[OperationId, _Loading] = {}

    def start(self, lease: Lease) -> bool:
        """Begin to bring what the store has after the lease's device part. False: there is no more
        to be had, or it is not worth it; nothing was changed."""
        core, first, prefetch = self._core, lease.num_device, lease.prefetch
        last = self._reach(lease)
        if prefetch is None or last <= first:
            return False
        least = 1 if prefetch.num_landed else core.config.threshold_pages
        if last - first < least or not self._costs.worth_fetching(last - first):
            return False
        spans = [component.span(first, last) for component in core.components[1:]]
        others = core.reserve_all(
            [(slot_of(c, DEVICE), end - start) for c, (start, end) in enumerate(spans, start=1)]
        )
        if others is None:
            return False
        cut = (last - first) * PAGE_ID_BYTES
        full = PageIds(lease.private_pages[:cut])
        lease.private_pages = PageIds(lease.private_pages[cut:])
        stream = Stream(
            lease, first, last, core.store_epoch, [full, *others], first, last, bool(others)
        )
        stream.moved_s = core.clock()
        lease.stream = stream
        self._open[stream] = None
        core.counters.streams += 1
        self._line.join(lease.key, partial(self._serve, stream))
        return True

    def close(self, stream: Stream) -> None:
        """Its lease ends, or waits no longer: what it holds is freed when nothing uses it."""
        stream.ended = stream.closed = True
        stream.lease.stream = None
        if stream.intake is not None:
            self._intakes.close(stream.intake)
            stream.intake = None
        self._free_if_unused(stream)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Pages that streams own, for check_invariants()."""
        index, tier = divmod(slot, NUM_TIERS)
        if tier == DEVICE:
            return [stream.device[index] for stream in self._open]
        spans = [span for loading in self._loading.values() for span in loading.spans]
        return [page_ids(hosts) for component, _, hosts in spans if component == index]

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
        present = [mine[first - prefetch.first :] for mine in prefetch.present]
        return point_before(core.components, present, first, max(first, limit))

    # ---- part by part ---------------------------------------------------------------------------

    def _serve(self, stream: Stream) -> Turn:
        """Its turn: ask for the next part, as large as there is room for."""
        core, at = self._core, stream.next
        if stream.closed:
            return Turn.SERVED
        if stream.ended or not core.healthy or core.store_epoch != stream.epoch:
            self._end(stream)
            return Turn.SERVED
        spans = [(c.index, *c.span(stream.first, stream.last)) for c in core.components[1:]]
        if not stream.needs_state:
            count = min(stream.last - at, PART_PAGES, self._line.allowance(stream.lease.key, at))
            if count <= 0:
                return Turn.WAITS if self._line.is_spent else Turn.PASSES
            spans = [(0, at, at + min(count, core.room(HOST)))]
        pages = core.reserve_all([(slot_of(c, HOST), end - start) for c, start, end in spans])
        if pages is None or not all(pages):
            busy = stream.num_loads or stream.lease.loads  # these will make room
            if not busy and not stream.lets_go:
                stream.lets_go = True
                self._let_go()
            if busy or core.clock() < stream.moved_s + core.config.prefetch.max_timeout_s:
                return Turn.PASSES
            self._end(stream)
            return Turn.SERVED
        stream.needs_state, stream.moved_s = False, core.clock()
        stream.next = spans[0][2] if spans[0][0] == 0 else at
        known = [bytearray(stream.last) for _ in core.components]
        timeout_s = core.config.prefetch.max_timeout_s
        intake = Intake(stream.lease.key, at, stream.next, timeout_s, stream.epoch, known)
        intake.stream, stream.intake = stream, self._intakes.open(intake)
        self._intakes.send(intake, [(c, start) for c, start, _ in spans], pages)
        return Turn.SERVED

    def arrived(self, stream: Stream, intake: Intake) -> None:
        """A part has come to the host, in full or not, or is overdue."""
        self._intakes.take_out(intake)
        stream.intake = None
        spans: list[tuple[int, int, list[int]]] = []
        if intake.num_wanted:
            at = intake.first
            while at in intake.here[0]:
                at += 1
            spans.append(
                (0, intake.first, [intake.here[0].pop(p) for p in range(intake.first, at)])
            )
            intake.num_landed = at - intake.first
            stream.end = min(stream.end, at) if at < intake.last else stream.end
        else:
            for component in self._core.components[1:]:
                here = intake.here[component.index]
                pages = range(*component.span(stream.first, stream.last))
                if len(here) < len(pages):
                    stream.end = stream.first
                else:
                    spans.append((component.index, pages[0], [here.pop(p) for p in pages]))
        self._intakes.close(intake)
        self._load(stream, [span for span in spans if span[2]])
        if stream.end < stream.last or stream.next == stream.last:
            self._end(stream)
        else:
            self._line.join(stream.lease.key, partial(self._serve, stream))

    def _load(self, stream: Stream, spans: list[tuple[int, int, list[int]]]) -> None:
        core = self._core
        if not spans:
            return
        op = core.operations.start(
            Kind.LOAD,
            {core.components[c].name: len(hosts) for c, _, hosts in spans},
            now=core.clock(),
            timeout_s=LOAD_TIMEOUT_S,
            on_report=self._loaded,
        )
        self._loading[op.id] = _Loading(stream, spans)
        stream.num_loads += 1
        for component, first, hosts in spans:
            start = core.components[component].span(stream.first, stream.last)[0]
            at = (first - start) * PAGE_ID_BYTES
            target = stream.device[component][at : at + len(hosts) * PAGE_ID_BYTES]
            name = core.components[component].name
            core.outbox.append(Load(op.id, name, page_ids(hosts), PageIds(target)))

    def _loaded(self, op: Operation) -> None:
        stream = self._loading[op.id].stream
        if op.state is OpState.OVERDUE and not stream.closed:
            self.close(stream)
        if op.state is not OpState.ENDED:
            return
        for component, first, hosts in self._loading.pop(op.id).spans:
            self._intakes.free(component, hosts)
            if not op.all_ok():
                arrived = first + op.agreed_pages() if component == 0 else stream.first
                stream.end = min(stream.end, arrived)
        stream.num_loads -= 1
        self._core.finish(op)
        if stream.closed:
            self._free_if_unused(stream)
        elif stream.end < stream.last or stream.ended:
            self._end(stream)

    # ---- ending ---------------------------------------------------------------------------------

    def _end(self, stream: Stream) -> None:
        """Ask for no more; when all that was asked for is settled, the lease goes on."""
        stream.ended = True
        intake = stream.intake
        if intake is not None and stream.end <= intake.first < intake.last:
            self._intakes.close(intake)
            stream.intake = intake = None
        busy = stream.num_loads or intake is not None or stream.closed
        if not busy and self._settle(stream) is not Turn.SERVED:
            self._line.join(stream.lease.key, partial(self._settle, stream))

    def _settle(self, stream: Stream) -> Turn:
        core, lease, first = self._core, stream.lease, stream.first
        if stream.closed:
            return Turn.SERVED
        if lease.loads:  # what lies in front is still on its way
            return Turn.PASSES
        reached = min(stream.next, stream.end)
        unhindered = obstacle(core, lease.device_tail, lease.key, reached, DEVICE)
        if len(core.components) > 1 and unhindered < stream.last:
            unhindered = first
        reached = first if lease.load_state is LoadState.FAILED else min(reached, unhindered)
        cut = (reached - first) * PAGE_ID_BYTES
        full, lease.stream = stream.device[0], None
        lease.private_pages = PageIds(full[cut:] + lease.private_pages)
        stream.device[0] = PageIds(full[:cut])
        if reached > first:
            arrival = Arrival(lease.key, first, reached, stream.device, stream.epoch, DEVICE)
            tail = land(core, lease.device_tail, arrival)
            core.counters.streamed_pages += tail.end - first
            stream.closed = True
            del self._open[stream]
            self._enter(lease, tail)
        else:
            stream.closed = True
            self._free_if_unused(stream)
        return Turn.SERVED

    def _free_if_unused(self, stream: Stream) -> None:
        if stream.num_loads == 0:
            del self._open[stream]
            for component, pages in enumerate(stream.device):
                self._core.allocators[slot_of(component, DEVICE)].free(pages)
