"""Prefetches: what the store has of requests' prefixes, brought to the host while they queue.

Host pages are reserved only for pages that are there. If they do not fit, the shortfall is evicted;
if that is not enough, the fetch is cut to what fits, as long as that reaches the threshold. Cutting
concerns only the end: keys and anchor describe what lies before. With several components the end is
always a point that can be gone on from; if what belongs to it does not come, what belongs to a
nearer one is fetched.

Pages on their way are fetched once. Whoever wants them too waits for the same fetch, which goes on
for as long as anybody does. What the budget did not allow follows when it does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

from quire.config import PrefetchPolicy
from quire.manager.core import Core
from quire.manager.costs import CostModel, Way
from quire.manager.counters import Decline, Fit
from quire.manager.fetches.base import (
    DONE,
    PROBED,
    Intake,
    PageRange,
    Prefetch,
    PrefetchState,
    point_before,
)
from quire.manager.fetches.intakes import Intakes
from quire.manager.fetches.line import Line, Turn
from quire.manager.fetches.probes import Probes
from quire.manager.lease import Lease
from quire.tree import slot_of
from quire.types import HOST

_NO_STORE = Decline.NO_STORE  # by a plain name: what every request without a store asks for
_UNSERVED = {PrefetchState.PROBING: Decline.ABORTED, PrefetchState.WAITING: Decline.BUDGET}
"""Why nothing comes of a prefetch that is settled in these states."""


class Prefetches:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        intakes: Intakes,
        line: Line,
        advance: Callable[[Lease], None],
    ) -> None:
        self._core = core
        self._costs = costs
        self._intakes = intakes
        self._line = line
        self._advance = advance
        self.probes = Probes(core, self._found, self._end)
        self._timeouts: list[tuple[float, int, Prefetch]] = []
        """When the policy stops waiting, a number to break ties, and for what."""
        self._num_timeouts = 0
        self._has_timeouts = core.config.prefetch.policy is PrefetchPolicy.TIMEOUT
        self.put_off: list[Prefetch] = []
        """Found, and their requests need not wait: only if they are not admitted before the next
        step is anything fetched for them."""
        self._num_due = 0
        """Of these, in the next step."""

    def start(self, lease: Lease, *, fetch: bool, can_meet: bool) -> Prefetch:
        """Begin looking for what comes after the lease's tail; `fetch` it when found. `can_meet`:
        the request can compute while pages come."""
        core, first, key = self._core, lease.tail.end, lease.key
        prefetch = Prefetch(lease, key, first, core.clock(), fetch, can_meet)
        reason = self._reason_not_to_probe(key.last - first)
        if reason is not None:
            self._end(prefetch, reason)
            return prefetch
        prefetch.known = [bytearray(first) for _ in core.components]
        if first:
            key.anchor(first, core.tree.last_key_of(lease.tail))
        self.probes.queued.append(prefetch)
        self._remember_timeout(prefetch)
        return prefetch

    def fetch(self, prefetch: Prefetch) -> None:
        """What was only asked about is wanted now."""
        if not prefetch.wants_fetch:
            prefetch.wants_fetch = True
            if prefetch.state is PROBED:
                self._found(prefetch)

    def is_over(self, prefetch: Prefetch) -> bool:
        """Need the request wait no longer, by the prefetch policy?"""
        if prefetch.is_settled or self._core.config.prefetch.policy is PrefetchPolicy.BEST_EFFORT:
            return True
        return self._core.clock() >= prefetch.timeout_at_s

    def next_timeout(self) -> float | None:
        """When the policy will next stop waiting for something, if it is time that decides."""
        heap = self._timeouts
        if not heap:
            return None
        now = self._core.clock()
        while heap:
            due, _, prefetch = heap[0]
            if due > now and due == prefetch.timeout_at_s and not prefetch.is_settled:
                return due
            heapq.heappop(heap)
        return None

    @property
    def has_work(self) -> bool:
        return bool(self.put_off or self.probes.queued)

    def settle(self, prefetch: Prefetch) -> None:
        """The request goes on now: land what has arrived, and stop the rest unless others want it.
        Any state, any time."""
        if prefetch.state is DONE:
            return
        intake = prefetch.intake
        if intake is not None:
            self._intakes.take_out(intake)
            self._intakes.publish(intake)
            intake.wanted_by.remove(prefetch)
            if not intake.wanted_by:
                self._intakes.close(intake)
        is_met = prefetch.way is Way.BOTH
        self._end(prefetch, None if is_met else _UNSERVED.get(prefetch.state))

    def flush(self) -> None:
        """Once per step, if anything was put off."""
        due, self.put_off = self.put_off[: self._num_due], self.put_off[self._num_due :]
        self._num_due = len(self.put_off)
        for prefetch in due:
            if prefetch.state is PROBED:
                self._join(prefetch)

    def _reason_not_to_probe(self, num_wanted: int) -> Decline | None:
        config = self._core.config
        if config.host_pages == 0:
            return Decline.NO_HOST
        reason = self._reason_not_to_fetch()
        if num_wanted < config.threshold_pages and reason is not _NO_STORE:
            return Decline.BELOW_THRESHOLD
        return reason

    def _reason_not_to_fetch(self) -> Decline | None:
        if self._core.store_epoch == 0:
            return _NO_STORE
        return Decline.WORKER_LOST if self._core.operations.lost_ranks else None

    def _remember_timeout(self, prefetch: Prefetch) -> None:
        """By how much is wanted now."""
        config = self._core.config
        if self._has_timeouts:
            wanted = prefetch.num_fetching or prefetch.key.last - prefetch.first
            timeout_s = config.prefetch.timeout_s(wanted * config.page_size)
            prefetch.timeout_at_s = due = prefetch.started_s + timeout_s
            self._num_timeouts += 1
            heapq.heappush(self._timeouts, (due, self._num_timeouts, prefetch))

    def _end(self, prefetch: Prefetch, reason: Decline | None = None) -> None:
        """It is over; for a `reason`, unless something has come of it."""
        prefetch.state, prefetch.intake = DONE, None
        if reason is not None and not prefetch.num_landed:
            prefetch.declined = reason
            self._core.counters.declined[reason] += 1
        if prefetch.lease.intake is not None:
            self._intakes.fresh[prefetch.lease.intake] = None

    def _found(self, prefetch: Prefetch) -> None:
        hit, threshold = prefetch.num_hit, self._core.config.threshold_pages
        if not prefetch.wants_fetch:
            prefetch.state = PROBED
        elif hit < threshold:
            lacks_state = prefetch.num_asked >= threshold
            self._end(prefetch, Decline.NO_STATE if lacks_state else Decline.SHORT_HIT)
        else:
            self._begin(prefetch)

    def _begin(self, prefetch: Prefetch) -> None:
        """It is there: by which way to get it?"""
        hit, ahead = prefetch.num_hit, self._num_ahead(prefetch)
        is_sound = len(self._core.components) == 1
        can_meet, pace = prefetch.can_meet and is_sound, prefetch.pace
        prefetch.way = self._costs.choose(hit, ahead, can_meet=can_meet, pace=pace)
        if prefetch.can_meet and not is_sound:
            times = self._costs.times(hit, ahead, pace)
            self._core.counters.unsound_meetings += times is not None and times.best is Way.BOTH
        match prefetch.way:
            case Way.COMPUTE:
                self._end(prefetch, Decline.SLOWER_THAN_RECOMPUTE)
            case Way.FETCH:
                self._join(prefetch)
            case Way.BOTH:
                prefetch.state = PROBED
                self.put_off.append(prefetch)

    def _num_ahead(self, prefetch: Prefetch) -> int:
        """Pages that it would wait for before its own; none, if somebody brings them already."""
        first = prefetch.first
        if self._intakes.bringing(prefetch.key.page_keys(first, first + 1)) is not None:
            return 0
        return self._intakes.inflight_pages

    def _join(self, prefetch: Prefetch) -> None:
        prefetch.state = PrefetchState.WAITING
        self._line.join(prefetch.key, partial(self._serve, prefetch))

    def _serve(self, prefetch: Prefetch) -> Turn:
        """Its turn: share what is on its way, else reserve and fetch what the budget allows."""
        if prefetch.state is not PrefetchState.WAITING:
            return Turn.SERVED  # settled meanwhile
        self._advance(prefetch.lease)
        at = max(prefetch.first + prefetch.num_landed, prefetch.lease.tail.end)
        end = prefetch.first + prefetch.num_hit
        reason = self._reason_not_to_fetch()
        if reason is not None or at >= end:
            self._end(prefetch, reason)
            return Turn.SERVED
        shared = self._intakes.bringing(prefetch.key.page_keys(at, at + 1))
        if shared is not None:
            if shared.lease is None:
                self._share(prefetch, shared)
            return Turn.SERVED if shared.lease is None else Turn.PASSES
        least = 1 if prefetch.num_landed else min(self._core.config.threshold_pages, end - at)
        coming = self._intakes.first_coming(prefetch.key, at, end)
        last = self._point(prefetch, at, min(coming, at + self._line.allowance(prefetch.key, at)))
        if last - at < least:
            if coming < end or self._intakes.is_moving:
                # Too little before what others bring: they first, and nobody else need wait.
                return Turn.PASSES if coming < end else Turn.WAITS
            # What is overdue may hold its pages for ever: nobody waits for those.
            left = self._core.config.max_inflight_pages - self._intakes.inflight_pages
            last = self._point(prefetch, at, min(end, at + left))
        if last - at < least:
            prefetch.is_cut = True
            self._end(prefetch, Decline.BUDGET)
            return Turn.SERVED
        self._reserve_and_send(prefetch, at, last, least)
        return Turn.SERVED

    def _share(self, prefetch: Prefetch, intake: Intake) -> None:
        intake.wanted_by.append(prefetch)
        prefetch.intake, prefetch.state = intake, PrefetchState.FETCHING
        prefetch.is_cut = intake.is_cut
        common = prefetch.key.common_pages(intake.key)
        last = min(intake.last, prefetch.first + prefetch.num_hit, common)
        prefetch.num_fetching = last - prefetch.first
        self._remember_timeout(prefetch)

    def _point(self, prefetch: Prefetch, at: int, limit: int) -> int:
        return point_before(self._core.components, prefetch.known, at, max(at, limit))

    def _reserve_and_send(self, prefetch: Prefetch, at: int, last: int, least: int) -> None:
        """Exact fit, else evict the shortfall, else cut to what fits, else decline."""
        core = self._core
        fit = self._send(prefetch, at, last)
        if fit is None:
            fit, prefetch.is_cut = Fit.TRUNCATED, True
            last = self._point(prefetch, at, min(last, at + core.room(HOST)))
            if last - at < least:
                self._end(prefetch, Decline.HOST_FULL)
                return
            if self._send(prefetch, at, last) is None:
                sizes = [(slot_of(c, HOST), end - start) for c, start, end in self._spans(at, last)]
                no_slot = any(core.room(slot) < size for slot, size in sizes)
                self._end(prefetch, Decline.NO_SLOT if no_slot else Decline.ALLOCATION_FAILED)
                return
        core.counters.fetched[fit] += 1

    def _send(self, prefetch: Prefetch, at: int, last: int) -> Fit | None:
        """Fetch pages [at, last), and the state to go on at `last`. None: nothing was changed."""
        core = self._core
        timeout_s = core.config.prefetch.max_timeout_s
        intake = Intake(prefetch.key, at, last, timeout_s, prefetch.known, core.store_epoch)
        intake.on_end, intake.is_cut = self._ended, prefetch.is_cut
        fit = self._intakes.send(intake, self._spans(at, last))
        if fit is not None:
            self._share(prefetch, intake)
        return fit

    def _spans(self, at: int, last: int) -> list[PageRange]:
        return [(c.index, *c.span(at, last)) for c in self._core.components]

    def _ended(self, intake: Intake) -> None:
        """What was sent for it has come, or not, or is overdue."""
        if intake.coming:
            self._intakes.take_out(intake)
        elif self._fetch_state(intake):
            return
        self._intakes.publish(intake)
        wanted, intake.wanted_by = intake.wanted_by, []
        self._intakes.close(intake)
        for prefetch in wanted:
            there = max(prefetch.first + prefetch.num_landed, prefetch.lease.tail.end)
            more = prefetch.first + prefetch.num_hit - there
            prefetch.intake = None
            if intake.first == intake.last and more > 0 and not intake.is_cut:
                self._join(prefetch)
            else:
                self._end(prefetch)

    def _fetch_state(self, intake: Intake) -> bool:
        """Not all has come: fetch the state of the deepest point that can still be had, if there
        is one and its state is not here."""
        core, first = self._core, intake.first
        if len(core.components) == 1 or self._reason_not_to_fetch() is not None:
            return False
        last = intake.run_here(0, first, intake.last)
        last = point_before(core.components, intake.known, first, last)
        others = self._spans(first, last)[1:] if last > first else []
        lacking = [span for span in others if intake.run_here(*span) < span[2]]
        if not lacking or self._intakes.send(intake, lacking) is None:
            return False
        for component, _, _ in lacking:
            self._intakes.free(component, intake.here[component].values())
            intake.here[component].clear()
        return True
