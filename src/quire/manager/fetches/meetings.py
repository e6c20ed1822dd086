"""Meetings: a prompt is computed from the front while the store's pages come from its back.

    page   first ──computed──▶ at ·········· low ◀──fetched, in parts──── last
                                 they meet

State of a page depends on tokens only, so what comes is right before what lies in front of it is
there; but it enters the tree when all of that is in it, and not before.

Parts are asked for from the end on, as long as they would be there before they are computed; all of
that at once, so that the store never waits for a step; they come one after the other. Whoever is
late gives pages over: of the parts that the request comes to and that are still on their way to the
host, it computes as many as take as long as the rest takes to come, in one go, if that is worth a
batch; else it waits, once: a store that stalls is not waited for again, and half of what is late is
computed each time. Copies to the device are waited for, since nothing is computed into pages that
are being written. What fails to come is computed, and nothing in front of it is asked for.

Only where all state is that of full pages: with windows or recurrent layers what comes later is of
no use to what is computed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quire.manager.core import Core
from quire.manager.costs import CostModel, Way
from quire.manager.fetches.base import Intake, Meeting, MeetingPart, PartState
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.landing import Arrival, land, obstacle
from quire.manager.fetches.line import Line, Turn
from quire.manager.fetches.parts import Parts
from quire.manager.lease import Lease, LoadState
from quire.manager.operations import Operation, OpState
from quire.tree import Node
from quire.types import DEVICE, NO_PAGES, PAGE_ID_BYTES, PageIds, num_pages

_PARTS = 16
_MIN_PART_PAGES, _MAX_PART_PAGES = 2, 64
"""A part is this share of what the store has, within these bounds: what the two may differ by when
they meet."""
_PARTS_COMING = 2
"""At once, while nobody knows how fast they come."""
_BATCH_PARTS = 2
"""A batch costs as much as so many parts, beside what is in it."""
_PATIENCE = 1.5
"""Times as long as it should take what is late to come."""


class Meetings:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        intakes: Intakes,
        line: Line,
        enter: Callable[[Lease, Node], None],
    ) -> None:
        """`enter`: a lease's device part ends there."""
        self._core = core
        self._costs = costs
        self._intakes = intakes
        self._line = line
        self._parts = Parts(core, intakes)
        self._enter = enter
        self._open: dict[Meeting, None] = {}

    @property
    def is_possible(self) -> bool:
        return len(self._core.components) == 1

    def start(self, lease: Lease, limit: int) -> bool:
        """The request has device pages for all of its prompt: bring what the store has, up to page
        `limit`, from its end on, while it computes from the front. It asks `front` how far it may,
        tells `computing` what it does, and asks `met` if they have met; then `lease.meeting` is
        None again. False: there is nothing to be had so, or another way is better."""
        lease.require_live()
        core, first, prefetch = self._core, lease.num_device, lease.prefetch
        if prefetch is None or prefetch.way is not Way.BOTH or not self.is_possible:
            return False
        held = first + num_pages(lease.private_pages)
        last = min(prefetch.first + prefetch.num_hit, held, limit)
        if lease.num_host or not core.healthy or not core.store_epoch:
            return False
        if last - first < core.config.threshold_pages:
            return False
        size = max(_MIN_PART_PAGES, min((last - first) // _PARTS, _MAX_PART_PAGES))
        pace, ahead = prefetch.pace, self._intakes.inflight_pages
        reckoned_s = self._costs.meeting_s(last - first, ahead, pace)
        begun = core.store_epoch, size, first, held, last, NO_PAGES, core.clock(), reckoned_s
        meeting = Meeting(lease, lease.key, *begun, pace)
        self._take(meeting, held - last)
        lease.meeting = meeting
        self._open[meeting] = None
        core.counters.meetings += 1
        # Before it is decided how much is computed first; but nobody is overtaken in the line.
        if self._line.claims or self._serve(meeting) is not Turn.SERVED:
            self._line.join(meeting.key, partial(self._serve, meeting))
        return True

    def front(self, lease: Lease, at: int, *, is_computed: bool) -> int:
        """Page up to which the request may compute now, from page `at` on, while it has a meeting:
        what is still on its way to the host when it is needed, is computed. If that is `at` itself,
        they meet there. `is_computed`: all before `at` is; what is still under way takes its time,
        in which more comes, and nothing is late before that."""
        meeting = lease.meeting
        assert meeting is not None
        if at < meeting.low or not meeting.parts or not is_computed:
            return meeting.low
        late = meeting.late
        count = self._num_overtaken(meeting, late) if late else 0
        if count:
            self._core.counters.overtaken_pages += late[count - 1].last - late[0].first
            self._drop_front(meeting, count)
        return meeting.low

    def _num_overtaken(self, meeting: Meeting, late: Sequence[MeetingPart]) -> int:
        """How many of these are computed now; 0: they are waited for."""
        num_pages, first_pages = late[-1].last - late[0].first, late[0].last - late[0].first
        times = self._costs.times(num_pages, pace=meeting.pace)
        if times is not None:
            share = times.fetch_s / (times.fetch_s + times.compute_s)
            part_s = self._costs.compute_s(first_pages)
            if times.fetch_s > max(part_s, share * times.compute_s) + _BATCH_PARTS * part_s:
                return max(1, int(share * len(late)))
        now = self._core.clock()
        if meeting.waits_until_s is None:
            meeting.waits_until_s = now + (0.0 if times is None else _PATIENCE * times.fetch_s)
        meeting.is_patient = meeting.is_patient and now < meeting.waits_until_s
        return 0 if meeting.is_patient else -(-len(late) // 2)

    def computing(self, lease: Lease, last: int) -> None:
        """Pages before `last` are given to the model, while it has a meeting."""
        meeting = lease.meeting
        assert meeting is not None
        assert last <= meeting.low, "pages that are being fetched are not computed"
        meeting.at = max(meeting.at, last)

    def met(self, lease: Lease, computed: int) -> int | None:
        """All pages before `computed` are computed and nothing is under way. Have they met? Then
        what has come is the lease's, and the page after it is returned: there the request goes
        on."""
        lease.require_live()
        meeting = lease.meeting
        if meeting is None:
            return None
        waits = any(part.state is not PartState.LOADED for part in meeting.parts)
        if computed < meeting.low or waits or lease.loads:
            return None
        if lease.load_state is LoadState.FAILED:
            return None
        high = meeting.high if meeting.parts else meeting.low
        self._core.counters.met_pages += high - meeting.low
        if meeting.reckoned_s is not None:
            self._costs.observe_meeting(meeting.reckoned_s, self._core.clock() - meeting.begun_s)
        self._end(meeting, high)
        return high

    def close(self, meeting: Meeting) -> None:
        """Its lease ends: what it holds is freed when nothing uses it."""
        meeting.lease.meeting = None
        for part in meeting.parts:
            self._give_up(part)
        self._free_if_unused(meeting)

    def reserved_pages(self) -> list[PageIds]:
        """Device pages of full attention that meetings own, for check_invariants()."""
        return [meeting.back for meeting in self._open]

    # ---- asking ---------------------------------------------------------------------------------

    def _serve(self, meeting: Meeting) -> Turn:
        """Its turn: ask for the part before those that were asked for."""
        key = meeting.key
        while self._may_ask(meeting):
            wanted = min(meeting.part_pages, meeting.low - meeting.at)
            if not self._is_due(meeting, wanted):
                return Turn.PASSES
            count = min(wanted, self._line.allowance(key, meeting.low - wanted))
            if count <= 0:
                return Turn.WAITS if self._line.is_spent else Turn.PASSES
            if not self._ask(meeting, count):
                return Turn.PASSES
        return Turn.SERVED

    def _may_ask(self, meeting: Meeting) -> bool:
        """Will there ever be more to ask for?"""
        core = self._core
        if meeting.closed or not meeting.asks or meeting.at >= meeting.low:
            return False
        return core.healthy and core.store_epoch == meeting.epoch

    def _is_due(self, meeting: Meeting, count: int) -> bool:
        """Would so many more be there before the request has computed them?"""
        own, before = meeting.num_coming_pages, meeting.low - meeting.at
        ahead = self._intakes.inflight_pages - own + own * meeting.pace
        comes_first = self._costs.comes_first(count, ahead, before, meeting.pace)
        if comes_first is None:
            return meeting.num_coming < _PARTS_COMING and before > count
        return comes_first

    def _ask(self, meeting: Meeting, count: int) -> bool:
        """False: the host has no room."""
        last = meeting.low
        first = last - count
        intake = self._parts.new(meeting.key, first, last, meeting.epoch, last)
        if meeting.parts:
            intake.after = next(iter(meeting.parts[0].intake.coming), None)
        part = MeetingPart(first, last, intake)
        intake.on_end = partial(self._arrived, meeting, part)
        if self._intakes.send(intake, [(0, first, last)]) is None:
            return False
        self._take(meeting, count)
        meeting.parts.insert(0, part)
        return True

    # ---- arriving -------------------------------------------------------------------------------

    def _arrived(self, meeting: Meeting, part: MeetingPart, intake: Intake) -> None:
        """A part has come to the host, in full or not, or is overdue."""
        self._parts.take(intake)
        part.state, here = PartState.HERE, intake.here[0]
        first = last = part.last
        while first > part.first and first - 1 in here:
            first -= 1
        if first > part.first:
            meeting.asks = False
            if part is meeting.parts[-1]:  # nothing lies behind it: what is lost is computed later
                last = intake.run_here(0, part.first, part.last)
                first = part.first
        missed = part.last - part.first - (last - first)
        self._cut(meeting, part, first, last)
        intake.first = intake.last - missed
        self._load_what_is_here(meeting)

    def _cut(self, meeting: Meeting, part: MeetingPart, first: int, last: int) -> None:
        """Of a part only [first, last) has come."""
        index = meeting.parts.index(part)
        if last < part.last:
            meeting.high = last
        if first == last:
            self._give_up(part)
            if last < part.last:  # it was the last: the end is that of the one before
                meeting.parts.pop()
                meeting.high = part.first
            else:
                self._drop_front(meeting, index + 1)
        elif first > part.first:
            self._drop_front(meeting, index)
            self._give_back(meeting, first - part.first)
        part.first, part.last = first, last

    def _load_what_is_here(self, meeting: Meeting) -> None:
        """From the back on, so that one that does not come never has others on the device before
        it."""
        for part in reversed(meeting.parts):
            if part.state is PartState.FETCHING:
                return
            if part.state is PartState.HERE:
                self._load(meeting, part)

    def _load(self, meeting: Meeting, part: MeetingPart) -> None:
        first, last, told = part.first, part.last, partial(self._loaded, meeting)
        target = ((0, first, last), self._pages(meeting, first, last))
        part.state = PartState.LOADING
        meeting.loading[self._parts.load(part.intake, [target], told)] = part

    def _loaded(self, meeting: Meeting, op: Operation) -> None:
        failed = op.state is OpState.OVERDUE or (op.state is OpState.ENDED and not op.all_ok())
        if failed and not meeting.closed:
            meeting.asks = False
            meeting.lease.load_state = LoadState.FAILED
        if op.state is not OpState.ENDED:
            return
        part = meeting.loading.pop(op.id)
        part.state = PartState.LOADED
        self._parts.loaded(part.intake, op)
        if meeting.closed:
            self._free_if_unused(meeting)

    # ---- pages ----------------------------------------------------------------------------------

    def _take(self, meeting: Meeting, count: int) -> None:
        """So many pages before `low`, from the lease."""
        lease = meeting.lease
        cut = len(lease.private_pages) - count * PAGE_ID_BYTES
        meeting.back = PageIds(lease.private_pages[cut:] + meeting.back)
        lease.keep(PageIds(lease.private_pages[:cut]))
        meeting.low -= count

    def _give_back(self, meeting: Meeting, count: int) -> None:
        """So many pages from `low` on, to the lease."""
        lease, cut = meeting.lease, count * PAGE_ID_BYTES
        lease.keep(PageIds(lease.private_pages + meeting.back[:cut]))
        meeting.back = PageIds(meeting.back[cut:])
        meeting.low += count

    def _pages(self, meeting: Meeting, first: int, last: int) -> PageIds:
        low = meeting.low
        return PageIds(meeting.back[(first - low) * PAGE_ID_BYTES : (last - low) * PAGE_ID_BYTES])

    def _drop_front(self, meeting: Meeting, count: int) -> None:
        """The first parts, none of which is being copied, are computed instead."""
        dropped, meeting.parts = meeting.parts[:count], meeting.parts[count:]
        for part in dropped:
            self._give_up(part)
            self._give_back(meeting, part.last - part.first)

    def _give_up(self, part: MeetingPart) -> None:
        if part.state in (PartState.FETCHING, PartState.HERE):
            part.intake.first = part.intake.last  # nothing of it is missed
            self._intakes.close(part.intake)

    # ---- ending ---------------------------------------------------------------------------------

    def _end(self, meeting: Meeting, high: int) -> None:
        """All before `high` is on the device: into the tree with it, if all that lies in front is
        there. What is not stays the lease's, which shares it as if it had computed it."""
        core, lease, low = self._core, meeting.lease, meeting.low
        reached = low
        if lease.num_device == low:
            reached = obstacle(core, lease.device_tail, meeting.key, high, DEVICE)
        cut = (reached - low) * PAGE_ID_BYTES
        come, rest = PageIds(meeting.back[:cut]), meeting.back[cut:]
        lease.keep(PageIds(lease.private_pages + rest))
        lease.meeting = None
        del self._open[meeting]
        if reached > low:
            arrival = Arrival(meeting.key, low, reached, [come], meeting.epoch, DEVICE)
            tail = land(core, lease.device_tail, arrival)
            self._enter(lease, tail)
            if tail.end < reached:  # two pages of one hash: what has no place is gone
                lease.load_state = LoadState.FAILED

    def _free_if_unused(self, meeting: Meeting) -> None:
        if not meeting.loading:
            del self._open[meeting]
            self._core.allocators[DEVICE].free(meeting.back)
