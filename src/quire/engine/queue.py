"""Queue: the requests that an engine has, by name and in the order in which they are served.

Knows requests and time; neither pages nor models. Each is in one of three lists:

    waiting ──admitted──▶ running ──its last token──▶ gone
       ◀──preempted, begun again──┘└──for a peer──▶ holding ──taken──▶ gone

Tenants take turns: a request has the turn after the last one of its own tenant, and never one that
is over. Who has a higher priority comes some turns earlier, and so nobody waits for ever.

    tenant a   1  2  3  4  5        b arrives while turn 2 is served:   a2 b3 a3 b4 a4 a5
    tenant b         3  4
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable

from quire.engine.counters import SchedulerCounters
from quire.engine.request import Request, State
from quire.types import RequestId, num_pages, tenant_of

_TURNS_PER_PRIORITY = 16
_MOST_TENANTS = 4096


class Queue:
    def __init__(self, *, max_running: int, max_waiting: int, clock: Callable[[], float]) -> None:
        self.max_running = max_running
        self._max_waiting = max_waiting
        self._clock = clock
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in the order of their turns."""
        self.waiting_tokens = 0
        """Of those that wait, together."""
        self.holding: list[Request] = []
        """Computed for peers, and kept until they have taken it."""
        self.counters = SchedulerCounters()
        self._requests: dict[RequestId, Request] = {}
        self._deadlines: list[tuple[float, RequestId]] = []
        self._turn = 0
        """Of the last request that got to run."""
        self._turns: dict[str, int] = {}
        """By tenant, of its last request."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    @property
    def is_full(self) -> bool:
        """Has it as many requests as it may? Those that are computed for peers do not count."""
        return len(self._requests) - len(self.holding) >= self._max_waiting + self.max_running

    @property
    def may_run_more(self) -> bool:
        return len(self.running) < self.max_running

    def add(self, request: Request) -> None:
        tenant = tenant_of(request.salt)
        turn = max(self._turn, self._turns.get(tenant, 0)) + 1
        self._turns[tenant] = turn
        request.order = (turn - _TURNS_PER_PRIORITY * request.priority, self.counters.arrived)
        self._requests[request.id] = request
        heapq.heappush(self._deadlines, (request.deadline_s, request.id))
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """It waits, from now on or again."""
        request.state = State.WAITING
        self.waiting_tokens += request.length
        bisect.insort(self.waiting, request, key=_order)

    def run(self, request: Request) -> None:
        """It has its pages."""
        self._leave(request)
        self._turn = max(self._turn, request.order[0] + _TURNS_PER_PRIORITY * request.priority)
        if len(self._turns) > _MOST_TENANTS:
            self._turns = {name: turn for name, turn in self._turns.items() if turn > self._turn}
        bisect.insort(self.running, request, key=_order)
        request.state = State.RESTORING

    def hold(self, request: Request) -> None:
        """All of it is there, for a peer to take."""
        self._leave(request)
        request.state = State.HOLDING
        self.holding.append(request)

    def requeue(self, request: Request) -> None:
        """Back to waiting, from wherever it is."""
        self._leave(request)
        self.enqueue(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.id]
        self._leave(request)

    def take_late(self) -> list[Request]:
        """Those whose deadline has passed; they are still here."""
        now, late = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                late.append(request)
        return late

    def used_pages(self) -> int:
        """Device pages that running requests use."""
        return sum(num_pages(r.lease.pages) for r in self.running if r.lease is not None)

    def _leave(self, request: Request) -> None:
        """The list that it is in."""
        match request.state:
            case State.WAITING:
                at = bisect.bisect_left(self.waiting, request.order, key=_order)
                assert self.waiting[at] is request
                del self.waiting[at]
                self.waiting_tokens -= request.length  # which only grows while it runs
            case State.HOLDING:
                self.holding.remove(request)
            case _:
                self.running.remove(request)


def _order(request: Request) -> tuple[int, int]:
    return request.order
