"""Admission: which waiting requests get their pages now, and who makes room for them.

A waiting request holds a lease, taken at arrival so that its prefetch could start at once. Under
pressure the youngest of them yields its device pages first, never what is on its way to the host.
Nobody overtakes one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.engine.for_peers import ComputedForPeers
from quire.engine.grammar import CompileStage
from quire.engine.handovers import Handovers
from quire.engine.holds import Holds
from quire.engine.queue import Queue
from quire.engine.request import Request, State
from quire.manager import CacheManager
from quire.types import RequestId

_RETRY_STEPS = 8
"""Steps between two tries to admit a request that did not fit."""
_LOOKED_AT = 64
"""Requests that have waited longest of which each step asks whether they are ready, and as many of
the others."""
_LOOKUPS_PER_STEP = 8
"""Requests that were preempted, or begun again, and look again in one step."""


class Admission:
    def __init__(
        self,
        manager: CacheManager,
        queue: Queue,
        holds: Holds,
        kept: ComputedForPeers,
        remote: Handovers | None,
        *,
        reuse: bool,
    ) -> None:
        self._manager = manager
        self._queue = queue
        self._holds = holds
        self._kept = kept
        self._remote = remote
        self._reuse = reuse
        self._page_size = manager.config.page_size
        self._steps_to_wait = 0
        """Before anybody new is admitted, unless somebody lets go."""
        self._seen_let_go = 0
        self._turn = 0
        """Which of those that wait is looked at next, of those behind the first ones."""
        self._held_back: set[RequestId] = set()
        """They wait for a prefix that another computes."""

    def arrived(self, request: Request) -> None:
        """It has just been queued."""
        self._holds.look_up(request)
        for other in self._queue.running:
            self._expect_branches(other, others=[request])

    def forget(self, request: Request) -> None:
        """It is gone."""
        self._held_back.discard(request.id)

    def admitted(self) -> Iterator[Request]:
        """Admit who can be, in order, for as long as the caller wants more; those that can be
        computed at once."""
        lookups, queue = _LOOKUPS_PER_STEP, self._queue
        if self._is_too_early():
            return
        for request in self._next_waiting():
            if not queue.may_run_more:
                return
            if request.lease is None:
                if lookups == 0:
                    return
                lookups -= 1
                self._holds.look_up(request)
            if not self._is_ready(request) or self._kept.take_if_all_there(request):
                continue
            if self._is_being_computed(request):
                if request.id not in self._held_back:
                    self._held_back.add(request.id)
                    queue.counters.shared_waits += 1
                continue
            if not self._admit(request):
                # Nobody may overtake it, or a long prompt would wait for ever.
                self._steps_to_wait = _RETRY_STEPS if queue.running else 0
                self._seen_let_go = self._holds.num_let_go
                return
            if request.state is State.RUNNING:
                yield request

    def next_step(self) -> None:
        self._steps_to_wait = max(0, self._steps_to_wait - 1)

    def _next_waiting(self) -> list[Request]:
        """Whom to look at in this step, in order: the first ones, and some of the others in turn,
        so that a step costs the same however many wait for their prefixes to come."""
        waiting = self._queue.waiting
        if len(waiting) <= 2 * _LOOKED_AT:
            return waiting[:]
        first = self._turn if _LOOKED_AT <= self._turn < len(waiting) else _LOOKED_AT
        self._turn = first + _LOOKED_AT
        return waiting[:_LOOKED_AT] + waiting[first : self._turn]

    def go_on(self, request: Request) -> None:
        """Compute, if all that is to come through the host has come."""
        lease = request.lease
        assert lease is not None
        if lease.stream is None:
            request.state = State.RUNNING
            request.computed = lease.num_device * self._page_size
            if not request.for_peer:
                # If all is there, its last token is computed once more, for what comes after it.
                request.computed = min(request.computed, request.length - 1)
            self._holds.note_found(request, lease.num_device)

    def holding_device(self, but: Request | None = None) -> list[Request]:
        """Waiting requests that may hold device pages, the youngest first; but those that get pages
        from a peer last."""
        found = [
            request
            for request in reversed(self._queue.waiting)
            if (lease := request.lease) is not None
            and request is not but
            and not lease.yielded
            and lease.tail.end  # also of a part that it found on the host the device may have some
        ]
        return sorted(found, key=lambda request: request.handover is not None)

    def yield_device(self, request: Request) -> None:
        assert request.lease is not None
        self._manager.yield_device(request.lease)
        self._queue.counters.yielded += 1

    # ---- who -------------------------------------------------------------------------------------

    def _is_too_early(self) -> bool:
        return self._steps_to_wait > 0 and self._seen_let_go == self._holds.num_let_go

    def _is_ready(self, request: Request) -> bool:
        """Has all come that it waits for?"""
        assert request.lease is not None
        if request.grammar is not None and request.held is None:
            if request.grammar.stage is not CompileStage.READY:
                return False
            request.hold()
        if self._remote is not None and not self._remote.ready(request):
            return False
        return self._manager.ready(request.lease)

    def _is_being_computed(self, request: Request) -> bool:
        """Is somebody computing pages of this prompt that are not there yet?"""
        lease = request.lease
        assert lease is not None
        have = lease.num_device + lease.num_host
        for other in self._queue.running if self._reuse else ():
            # Only prompts: what another will generate cannot be known.
            if other.computed >= other.num_prompt - 1:
                continue
            common = request.key.common_pages(other.key)
            if common > have and other.computed < common * self._page_size:
                return True
        return False

    def _expect_branches(self, computing: Request, *, others: Iterable[Request]) -> None:
        """Have state kept where others will want to go on from what is being computed. Full pages
        are of use wherever they end; other state is where it was kept and nowhere else."""
        lease = computing.lease
        if lease is None or lease.state is None or not self._reuse:
            return
        for other in others:
            if other.lease is not None and other is not computing:
                common = computing.key.common_pages(other.key)
                if common > other.lease.num_device + other.lease.num_host:
                    self._manager.expect_branch(lease, common)

    # ---- its pages -------------------------------------------------------------------------------

    def _admit(self, request: Request) -> bool:
        """Give it its pages, all that the prompt needs and the first for the answer."""
        manager, lease = self._manager, request.lease
        assert lease is not None
        have, handover = manager.admit(lease), request.handover
        if handover is not None and have < handover.least:
            self._holds.let_go(request)  # what it yielded is gone: it is got again
            return False
        on_device = manager.match(lease.key).num_device
        if request.origin is not None:
            request.origin.later_device = on_device
        if not self._has_room(request, on_device) and self._queue.running:
            return False
        manager.load(lease)
        others: Iterator[Request] | None = None
        while not self._give(request):  # states and windows may be short where pages are not
            others = others or iter(self.holding_device(but=request))
            other = next(others, request)
            self.yield_device(other)
            if other is request:
                return False
        self._queue.run(request)
        if request.handover is not None:
            self._holds.note_found(request, lease.num_device)
        # One token at least is left to compute, also for a peer.
        meets = self._reuse and manager.meetings.start(
            lease, (request.length - 1) // self._page_size
        )
        if meets or not (self._reuse and manager.stream(lease)):
            self.go_on(request)
        if self._remote is not None:
            self._remote.admitted(request)
        self._queue.counters.admitted += 1
        self._held_back.discard(request.id)
        self._expect_branches(request, others=self._queue.waiting)
        return True

    def _has_room(self, request: Request, on_device: int) -> bool:
        """Are there device pages for all of its prompt, if others that wait yield theirs? The first
        `on_device` are there, whether it counts them as its own or not."""
        missing = -(-request.room_tokens // self._page_size) - on_device
        if missing <= self._manager.room():
            return True
        for other in self.holding_device(but=request):
            self.yield_device(other)
            if missing <= self._manager.room():
                return True
        return False

    def _give(self, request: Request) -> bool:
        """The pages a prompt lacks, and a state to work on."""
        manager, lease = self._manager, request.lease
        assert lease is not None
        if request.handover is not None and request.handover.least and lease.num_host:
            manager.load(lease)  # there was no room for all of it
            if lease.num_host:
                return False  # it was not got from a peer to be computed here
        if not manager.begin(lease):
            return False
        missing = request.missing_pages(request.room_tokens, self._page_size)
        return missing <= 0 or manager.extend(lease, missing)
