"""SimEngine: what an inference engine does with the cache, for many requests at once.

    ARRIVED ─▶ WAITING ─▶ LOADING ─▶ RUNNING ⇄ COMPUTING ─▶ finished
       ▲        (prefetch)    │          │
       └──────── a load failed┴──────────┘         aborted: from any state

Knows the manager's public interface and what every page must contain. Whenever a request is about
to use pages it did not compute, and again when it lets go of them, each is compared with the
oracle, on every rank.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from random import Random

import numpy as np

from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease, LoadState, PrefixMatch, Way
from quire.sim.clock import VirtualClock
from quire.sim.compute import Compute
from quire.sim.content import Oracle
from quire.sim.report import SimulationError, Tally
from quire.sim.workload import Draft, SimPrompt, Workload
from quire.types import RequestId, num_pages

MAX_WAIT_S = 60.0
"""Longer than a probe and a fetch may take with all their grace and a leap of time in each."""
MAX_LOAD_S = 90.0
_MAX_LOADS = 3
"""Failed loads after which a request computes everything itself."""
_PATIENCE = 20
"""Times a request asks for device pages before it gives up."""


class RequestState(enum.Enum):
    ARRIVED = enum.auto()
    WAITING = enum.auto()
    LOADING = enum.auto()
    RUNNING = enum.auto()
    COMPUTING = enum.auto()


@dataclass(slots=True, eq=False)
class SimRequest:
    id: RequestId
    prompt: SimPrompt
    tokens: list[int]
    key: PrefixKey
    expected: list[int]
    """What each full page must contain."""
    match: PrefixMatch
    answers_left: int
    queue_s: float
    """How long the scheduler lets it queue at least."""
    eager: bool
    """Computes while its loads are still arriving; and does not queue, if it may compute while the
    store's pages come."""
    state: RequestState = RequestState.ARRIVED
    since_s: float = 0.0
    """When it entered its state."""
    lease: Lease | None = None
    num_computed: int = 0
    """Leading pages of its table that hold what they must, once its loads are done."""
    loads_checked: bool = False
    failed_loads: int = 0
    patience: int = _PATIENCE
    draft: Draft | None = None
    """Computed next, behind `tokens`, all of which are computed."""


@dataclass(slots=True)
class SimEngine:
    manager: CacheManager
    compute: Compute
    oracle: Oracle
    workload: Workload
    clock: VirtualClock
    rng: Random
    drafts: int
    """Tokens that are drafted at a time."""
    requests: list[SimRequest] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        return self.compute.tally

    # ---- for the driver -------------------------------------------------------------------------

    def arrive(self, together: int = 1) -> None:
        """So many requests for one prompt."""
        prompt = self.workload.next_prompt()
        for _ in range(together):
            self._arrive(prompt)

    def _arrive(self, prompt: SimPrompt) -> None:
        namespace = prompt.session.namespace
        tokens = list(prompt.tokens)
        key = PrefixKey(namespace, tokens)
        self.tally.arrived += 1
        request = SimRequest(
            id=RequestId(f"r{self.tally.arrived}"),
            prompt=prompt,
            tokens=tokens,
            key=key,
            expected=self.oracle.pages(namespace, _as_bytes(tokens)),
            match=self._match(key),
            answers_left=self.rng.choice((0, 1, 3)),
            queue_s=self.rng.choice((0.0, 0.1, 0.3)),
            eager=self.rng.random() < 0.5,
            since_s=self.clock(),
        )
        self.requests.append(request)

    def advance(self, request: SimRequest) -> None:
        """Let a request do what it can do next."""
        match request.state:
            case RequestState.ARRIVED:
                self._acquire(request)
            case RequestState.WAITING:
                self._try_to_admit(request)
            case RequestState.LOADING:
                self._follow_load(request)
            case RequestState.RUNNING:
                self._run(request)
            case RequestState.COMPUTING:
                self._compute(request)

    def abort(self, request: SimRequest) -> None:
        self._leave(request)
        self.tally.aborted += 1

    # ---- the life of a request ------------------------------------------------------------------

    def _acquire(self, request: SimRequest) -> None:
        """The match may be old by now: acquire must notice."""
        prompt = request.prompt
        lease = self.manager.acquire(
            request.match, request.id, priority=prompt.priority, wish=prompt.wish
        )
        request.lease = lease
        if self.rng.random() < 0.9:
            self.manager.prefetch(lease, can_meet=True)
        self._enter(request, RequestState.WAITING)

    def _try_to_admit(self, request: SimRequest) -> None:
        lease = _lease(request)
        meets = lease.prefetch is not None and lease.prefetch.way is Way.BOTH
        if self.clock() - request.since_s < request.queue_s and not (meets and request.eager):
            return
        if not self.manager.ready(lease):
            self._limit_wait(request, MAX_WAIT_S)
            return
        promised = lease.num_device + lease.num_host
        self.manager.admit(lease)
        if lease.num_device + lease.num_host < promised:
            raise SimulationError(f"{request.id} was promised {promised} pages, admitted with less")
        if request.failed_loads < _MAX_LOADS and self.rng.random() < 0.95:
            self.manager.load(lease)
        if lease.state is not None and request.expected and self.rng.random() < 0.2:
            # The scheduler has seen that somebody else's prompt goes another way from there.
            self.manager.expect_branch(lease, self.rng.randint(1, len(request.expected)))
        request.num_computed = lease.num_device
        self._meet(request)
        request.loads_checked = False
        self.tally.reused_pages += lease.num_device
        self._enter(request, RequestState.LOADING)

    def _meet(self, request: SimRequest) -> None:
        """Have the rest of its prompt brought from the back, if there is room for all of it."""
        lease, size = _lease(request), self.manager.config.page_size
        missing = -(-len(request.tokens) // size) - num_pages(lease.pages)
        wants = lease.prefetch is not None and lease.prefetch.way is Way.BOTH
        if wants and missing > 0 and self.compute.extend(lease, missing):
            self.manager.meetings.start(lease, len(request.expected))

    def _follow_load(self, request: SimRequest) -> None:
        lease = _lease(request)
        if lease.load_state is LoadState.LOADING and not request.eager:
            self._limit_wait(request, MAX_LOAD_S)
        elif not self._restart_if_failed(request):
            self._enter(request, RequestState.RUNNING)

    def _run(self, request: SimRequest) -> None:
        """Get pages for the next chunk; or answer; or finish."""
        lease = _lease(request)
        if self._restart_if_failed(request):
            return
        if lease.meeting is not None:
            self._enter(request, RequestState.COMPUTING)
            return
        wanted = self._pages_due(request) - num_pages(lease.pages)
        if wanted > 0:
            count = min(wanted, self.rng.randrange(1, 5))
            if self.compute.begin(lease) and self.compute.extend(lease, count):
                self._enter(request, RequestState.COMPUTING)
            else:
                self._run_out(request)
        elif request.num_computed < len(request.expected) or request.draft is not None:
            self._enter(request, RequestState.COMPUTING)
        elif request.answers_left:
            self._answer(request)
        elif lease.load_state is LoadState.LOADING:
            self._limit_wait(request, MAX_LOAD_S)
        else:
            self._finish(request)

    def _compute(self, request: SimRequest) -> None:
        lease = _lease(request)
        if self._restart_if_failed(request):
            return
        if request.draft is not None:
            self._verify(request, request.draft)
            return
        if lease.state and lease.state.recurrent and lease.load_state is LoadState.LOADING:
            self._limit_wait(request, MAX_LOAD_S)  # nothing can be begun before its snapshot
            return
        first, last = request.num_computed, min(num_pages(lease.pages), len(request.expected))
        if lease.meeting is not None:
            if self._have_met(request):
                return
            front = self.manager.meetings.front(lease, first, is_computed=True)
            last = min(front, first + self.rng.randrange(1, 5))
            if last <= first:
                self._limit_wait(request, MAX_LOAD_S)
                return
            self.manager.meetings.computing(lease, last)
        if last > first:
            last = self.manager.next_stop(lease, first, last)
        if not self.compute.cover(lease, last):
            self._enter(request, RequestState.RUNNING)
            self._run_out(request)
            return
        save = lease.state is not None and self.rng.random() < 0.9
        self.compute.run(lease, request.expected, first, last, save=save)
        request.num_computed = last
        self.tally.computed_pages += last - first
        self.manager.costs.observe_prefill((last - first) * self.manager.config.page_size, 0.01)
        if self.rng.random() < 0.8:
            self.manager.commit(lease, request.key[:last])
        self._enter(request, RequestState.RUNNING)

    def _have_met(self, request: SimRequest) -> bool:
        lease = _lease(request)
        met = self.manager.meetings.met(lease, request.num_computed)
        if met is None:
            return False
        self.tally.reused_pages += met - request.num_computed
        request.num_computed = met
        request.loads_checked = False
        self._enter(request, RequestState.RUNNING)
        return True

    def _pages_due(self, request: SimRequest) -> int:
        """Pages for all its tokens, and those that are drafted."""
        drafted = len(request.draft.tokens) if request.draft is not None else 0
        return -(-(len(request.tokens) + drafted) // self.manager.config.page_size)

    def _answer(self, request: SimRequest) -> None:
        lease = _lease(request)
        request.answers_left -= 1
        can_go_back = lease.state is None or lease.state.recurrent is None
        if self.drafts and can_go_back and self.rng.random() < 0.8:
            request.draft = self.workload.draft(self.drafts)
        else:
            self._say(request, self.workload.answer())

    def _verify(self, request: SimRequest, draft: Draft) -> None:
        """Compute what is drafted, and keep of it what the model would have said. The pages of the
        rest stay the request's: its next tokens come there."""
        lease, namespace = _lease(request), request.key.namespace
        if num_pages(lease.pages) < self._pages_due(request):
            self._enter(request, RequestState.RUNNING)
            return
        if not self.compute.cover(lease, self._pages_due(request)):
            self._enter(request, RequestState.RUNNING)
            self._run_out(request)
            return
        drafted = self.oracle.pages(namespace, _as_bytes(request.tokens + draft.tokens))
        self.compute.run(lease, drafted, request.num_computed, len(drafted), save=False)
        request.num_computed = full_pages(request, draft.num_accepted)
        request.draft = None
        self.tally.accepted_tokens += draft.num_accepted
        self.tally.rejected_tokens += len(draft.tokens) - draft.num_accepted
        self._say(request, draft.chosen)
        if self.rng.random() < 0.8:
            self.manager.commit(lease, request.key[: request.num_computed])
        self._enter(request, RequestState.RUNNING)

    def _say(self, request: SimRequest, answer: list[int]) -> None:
        request.tokens += answer
        request.key = request.key.extend(answer)
        request.expected = self.oracle.pages(request.key.namespace, _as_bytes(request.tokens))
        self.tally.generated_tokens += len(answer)

    def _finish(self, request: SimRequest) -> None:
        self.manager.commit(_lease(request), request.key[: request.num_computed])
        self._leave(request)
        self.workload.finished(request.prompt, request.tokens)
        self.tally.finished += 1

    def _run_out(self, request: SimRequest) -> None:
        request.patience -= 1
        if request.patience == 0:
            self._leave(request)
            self.tally.preempted += 1

    def _restart_if_failed(self, request: SimRequest) -> bool:
        """Begin again from a new match when pages will not arrive; check them when they have."""
        lease = _lease(request)
        if lease.load_state is LoadState.FAILED:
            self.manager.release(lease)
            request.lease = None
            request.failed_loads += 1
            request.num_computed = 0
            request.draft = None
            request.match = self._match(request.key)
            self.tally.restarted += 1
            self._enter(request, RequestState.ARRIVED)
            return True
        if lease.load_state is LoadState.IDLE and not request.loads_checked:
            request.loads_checked = True
            self._check_pages(request)
        return False

    def _leave(self, request: SimRequest) -> None:
        if request.lease is not None:
            if request.lease.load_state is LoadState.IDLE:
                self._check_pages(request)
            self.manager.release(request.lease)
            request.lease = None
        self.requests.remove(request)

    def _enter(self, request: SimRequest, state: RequestState) -> None:
        request.state = state
        request.since_s = self.clock()

    # ---- checks ---------------------------------------------------------------------------------

    def _match(self, key: PrefixKey) -> PrefixMatch:
        """Match twice: reading must change nothing, not even the answer."""
        first, second = self.manager.match(key), self.manager.match(key)
        if first != second:
            raise SimulationError(f"two matches in a row differ: {first} and {second}")
        return second

    def _check_pages(self, request: SimRequest) -> None:
        """Every page of its tables that should be filled holds exactly what it must."""
        lease = _lease(request)
        count = max(request.num_computed, lease.num_device)
        who = f"{request.id} in state {request.state.name} ({lease.num_device} pages in the tree)"
        self.compute.check(lease, request.expected, count, who)

    def _limit_wait(self, request: SimRequest, limit_s: float) -> None:
        waited = self.clock() - request.since_s
        if waited > limit_s:
            raise SimulationError(f"{request.id} has been {request.state.name} for {waited:.0f} s")


def _lease(request: SimRequest) -> Lease:
    assert request.lease is not None
    return request.lease


def full_pages(request: SimRequest, accepted: int) -> int:
    """Pages computed with tokens that stay, when so many of a draft do. A unit that reaches to the
    token after those was computed with another."""
    namespace = request.key.namespace
    units = len(request.tokens) + accepted - namespace.unit.overlap
    return max(request.num_computed, units // namespace.page_size)


def _as_bytes(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()
