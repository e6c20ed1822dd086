"""Engine: the main loop's body. Requests and questions in, outputs and answers out.

Knows the scheduler, the cache's manager and the executor; nothing of sockets, text or HTTP. One
thread. `step()` is the life of the engine: hear what the workers have done, choose a batch, send
what the batch needs on its way, compute, take in.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import zmq

from quire.disagg.exchange import Exchange
from quire.engine.auditing import Auditor, Comparing
from quire.engine.config import Role
from quire.engine.executor import Executor, RankLost
from quire.engine.flights import Flights, Landed
from quire.engine.kvevents.publisher import EventPublisher
from quire.engine.lengths import MeasuredLengths
from quire.engine.messages import (
    AbortRequest,
    CountedTime,
    DraftStatus,
    EngineInfo,
    EngineReport,
    EngineStatus,
    Finish,
    Generate,
    Handed,
    HandoverStatus,
    Output,
    Outputs,
    PutQuestion,
    Requests,
    StoreStatus,
    Tenants,
    TenantStatus,
    TierStatus,
    ToServer,
)
from quire.engine.questions import Questions
from quire.engine.request import Request, request_status
from quire.engine.scheduler import Scheduler
from quire.errors import ConfigError, EngineError
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.peer.address import split_address
from quire.types import tenant_of
from quire.worker import WorkerGroup

_BUSY_WAIT_S = 0.001
"""Between two looks at the workers when there is nothing to compute but bytes are moving."""
_IDLE_WAIT_S = 0.2
_REPORT_EVERY_S = 0.5
_ATTACH_TIMEOUT_S = 60.0
_MOST_OF_A_TURN = 1.5
"""Of a batch's own time: a turn that took longer began with nothing to do."""
_MOST_TENANTS = 1024
_CHECK_SHARE = 0.01
_CHECK_PIECE_S = 0.002
"""Of its idle time an engine spends at most so much on checking itself, and this at a time."""


def tiers(manager: CacheManager, page_bytes: Mapping[str, int]) -> list[TierStatus]:
    """Per component, the device and the host; `full` first."""
    return [
        TierStatus(
            pool.tier.name.lower(),
            page_bytes[pool.component],
            pool.num_pages,
            pool.used_pages,
            pool.locked_pages,
            pool.component,
        )
        for pool in manager.pools()
    ]


def attach_and_wait(
    manager: CacheManager, workers: WorkerGroup, url: str, clock: Callable[[], float]
) -> None:
    """At start, when there is nobody to hold up. Raises EngineError with the reason."""
    change = manager.store.attach(url)
    deadline = clock() + _ATTACH_TIMEOUT_S
    while not change.done and clock() < deadline:
        workers.submit(manager.step(workers.poll()))
        time.sleep(_BUSY_WAIT_S)
    if change.error or not change.done:
        raise EngineError(f"store: {change.error or 'it could not be opened in time'}")


def ids_of(data: bytes) -> npt.NDArray[np.int32] | None:
    """Token ids, 32 bits each; None: they are not."""
    return np.frombuffer(data, dtype="<i4") if len(data) % 4 == 0 else None


class Engine:
    def __init__(
        self,
        executor: Executor,
        manager: CacheManager,
        scheduler: Scheduler,
        info: EngineInfo,
        *,
        exchange: Exchange | None = None,
        publisher: EventPublisher | None = None,
        private_prefixes: bool = False,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        lengths: MeasuredLengths | None = None,
        audit: float = 0.0,
        handed: list[Handed] | None = None,
    ) -> None:
        """`exchange`: of pages with other engines. `private_prefixes`: every request has a
        namespace of its own, and nothing is ever found again. `audit`: the share of idle time in
        which cached pages are computed again, to compare. `handed`: where hand-overs that have
        ended come to be told of."""
        self._lengths = lengths
        self._handed = handed
        self.manager = manager
        self.scheduler = scheduler
        self.info = info
        self.exchange = exchange
        self._publisher = publisher
        self._private_prefixes = private_prefixes
        self._num_private = 0
        self._executor = executor
        self._page_bytes = {tier.component: tier.page_bytes for tier in info.tiers}
        self._debug = debug
        self._clock = clock
        self._questions = Questions(
            manager,
            self.namespace_of,
            self.status,
            requests=self.requests,
            tenants=self.tenants,
            drain=self.drain,
            publisher=publisher,
        )
        self._flights = Flights(
            executor,
            overlaps=executor.overlaps and scheduler.can_go_ahead,
            clock=clock,
            meanwhile=self._hear,
        )
        self._outputs: list[Output] = []
        self._salts: dict[str, None] = {}
        """Of the last requests, that of the last one last."""
        self._seconds = {"step": 0.0, "model": 0.0}
        self._next_report_s = 0.0
        self._auditor: Auditor | None = None
        if audit > 0 and isinstance(executor, Comparing):
            self._auditor = Auditor(
                manager, executor, self._namespaces, dtype=info.dtype, share=audit, clock=clock
            )
        self._unchecked = False
        self._checking: Iterator[None] | None = None
        self._checked_at: tuple[int, ...] = ()
        self._next_check_s = 0.0

    # ---- messages -------------------------------------------------------------------------------

    def generate(self, message: Generate) -> None:
        problem = self._problem(message)
        if problem:
            self._outputs.append(Output(message.id, [], finish=Finish.ERROR, error=problem))
            return
        self._salts.pop(message.salt, None)
        self._salts[message.salt] = None
        if len(self._salts) > _MOST_TENANTS:
            del self._salts[next(iter(self._salts))]
        request = Request.arrive(message, self._namespace_for(message.salt), self._clock())
        refused = self.scheduler.add(request)
        if refused is not None:
            self._outputs.append(refused)

    def handle(self, message: Generate | AbortRequest | PutQuestion) -> None:
        match message:
            case Generate():
                self.generate(message)
            case AbortRequest(request_id):
                self.scheduler.abort(request_id)
            case PutQuestion(number, question):
                self._questions.ask(number, question)

    def drain(self) -> None:
        """Take no more prompts of other engines; what was begun for them is finished."""
        if self.exchange is not None:
            self.exchange.giver.is_draining = True

    def take_messages(self) -> list[ToServer]:
        """What the server should hear."""
        messages: list[ToServer] = list(self._questions.take_answers())
        if self._outputs:
            messages.append(Outputs(self._outputs))
            self._outputs = []
        if self._handed:
            messages += self._handed
            self._handed.clear()
        now = self._clock()
        if now >= self._next_report_s:
            self._next_report_s = now + _REPORT_EVERY_S
            messages.append(EngineReport(self.status()))
        return messages

    # ---- the step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn. False: there was nothing to compute. Raises RankLost, InvariantError.

        A batch is chosen and launched; then the one before it is waited for, if there is one.
        """
        began = self._clock()
        workers, manager, scheduler = self._executor.workers, self.manager, self.scheduler
        self._hear()
        for reason in manager.operations.lost_ranks.values():
            raise RankLost(reason)
        self._questions.advance()
        self._outputs += scheduler.expire() + scheduler.refuse()
        if self.exchange is not None:
            self.exchange.hear()
            self.exchange.advance()
        batch = scheduler.schedule()
        worked = batch is not None or len(self._flights) > 0
        if batch is None and scheduler.waits_for_tokens:
            # Now they are known; who asked for them is told while the next batch is computed.
            while self._flights:
                self._take_in(self._flights.land())
            batch = scheduler.schedule()
        workers.submit(manager.step())  # the loads that the batch will wait for
        if self.exchange is not None:
            self.exchange.tell()  # of what the workers know by now
        if batch is not None:
            self._flights.launch(batch)
        while self._flights.is_due or (batch is None and self._flights):
            self._take_in(self._flights.land())
        if self._publisher is not None:
            self._questions.tell_events()
        self._seconds["step"] += self._clock() - began
        if self._debug:
            manager.check_invariants()
        elif not worked:
            self._check_when_idle()
        if self._auditor is not None:
            self._auditor.step(idle=not worked and not len(scheduler))
        return worked

    def _hear(self) -> None:
        """What the workers have done, and what they are to do next: also while a batch takes long,
        so that what comes for others goes on its way."""
        workers = self._executor.workers
        workers.submit(self.manager.step(workers.poll()))

    def patience_s(self) -> float:
        """How long the loop may sleep, if no message comes, when a step found nothing to do."""
        copying = self.manager.operations.is_copying
        if copying or self._questions.pending or not self.scheduler.waits_for_peers:
            return _BUSY_WAIT_S
        times = [self.manager.next_wakeup(soon=True)]
        if self.exchange is not None:
            times.append(self.exchange.next_deadline())
        wakeup = min((time for time in times if time is not None), default=None)
        if wakeup is None:
            return _IDLE_WAIT_S
        return min(max(wakeup - self._clock(), _BUSY_WAIT_S), _IDLE_WAIT_S)

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        """What becomes readable when workers have something to say; for whoever sleeps."""
        return self._executor.workers.news

    def close(self) -> None:
        if self._lengths is not None:
            self._lengths.save()
        if self.exchange is not None:
            self.exchange.close()
        if self._publisher is not None:
            self._publisher.close()
        self._executor.close()

    # ---- state ----------------------------------------------------------------------------------

    def namespace_of(self, salt: str) -> Namespace:
        return self.info.namespace(salt)

    def _namespaces(self) -> list[Namespace]:
        """Of those who asked last."""
        return [self.namespace_of(salt) for salt in self._salts]

    def status(self) -> EngineStatus:
        manager, scheduler = self.manager, self.scheduler
        counters = manager.counters.snapshot() | scheduler.counters.snapshot()
        store = self._executor.store_account()
        return EngineStatus(
            tiers=self.tiers(),
            store=StoreStatus(
                state=manager.store.state.name.lower(),
                url=manager.store.url,
                counters=store.counters,
                stores=store.stores,
            ),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            waiting_tokens=scheduler.waiting_tokens,
            running_tokens=sum(request.length for request in scheduler.running),
            operations={k.value: n for k, n in manager.operations.num_running.items() if n},
            waiting_writes=manager.waiting_writes,
            ended={
                kind.value: CountedTime(ended.count, ended.seconds)
                for kind, ended in manager.operations.ended.items()
            },
            leases=len(manager.leases),
            counters=counters,
            seconds=dict(self._seconds),
            reuse=scheduler.reuse,
            handover=self._handover_status(),
            drafts=self._draft_status(),
        )

    def requests(self) -> Requests:
        """Every request in flight, and where it stands."""
        now, role = self._clock(), self.info.role
        return Requests(
            [request_status(request, role, now) for request in self.scheduler.requests()]
        )

    def tenants(self) -> Tenants:
        """Those who asked last."""
        running = Counter(tenant_of(request.salt) for request in self.scheduler.running)
        waiting = Counter(tenant_of(request.salt) for request in self.scheduler.waiting)
        salts: dict[str, list[str]] = {}
        for salt in self._salts:
            salts.setdefault(tenant_of(salt), []).append(salt)
        found = []
        for name, own in salts.items():
            pages = [self.manager.pages_of(self.namespace_of(salt)) for salt in own]
            device, host = (sum(each) for each in zip(*pages, strict=True))
            store = self.manager.store.use_of(name)
            found.append(TenantStatus(name, running[name], waiting[name], device, host, *store))
        config = self.manager.config
        share = config.tenant_share
        device, host = int(config.device_pages * share), int(config.host_pages * share)
        return Tenants(found, device, host, share)

    def _handover_status(self) -> HandoverStatus | None:
        if self.exchange is None:
            return None
        counters = self.exchange.receiver.counters
        moved = self._executor.workers.peer_counters()
        return HandoverStatus(
            open=len(self.exchange.receiver.open) + len(self.exchange.giver.open),
            sent_pages=moved.get("peer_sent_pages", 0),
            sent_bytes=moved.get("peer_sent_bytes", 0),
            received_pages=moved.get("peer_received_pages", 0),
            received_bytes=moved.get("peer_received_bytes", 0),
            received_by={
                kind: moved[name]
                for kind in ("shm", "tcp", "nixl")
                if (name := f"peer_received_bytes_{kind}") in moved
            },
            transfers=CountedTime(counters.transfers, counters.transfer_s),
            restores={
                outcome: CountedTime(count, counters.restore_s[outcome])
                for outcome, count in counters.restores.items()
            },
            promised_pages=counters.promised_pages,
            restored_pages=counters.restored_pages,
            repairs=dict(counters.repairs),
            local=dict(counters.local),
            strangers=self.exchange.hub.strangers,
            links=self.exchange.links,
            transports=self.exchange.transports,
        )

    def _draft_status(self) -> DraftStatus | None:
        if self.scheduler.drafting is None:
            return None
        counted = self.scheduler.drafting.speculation.counters
        return DraftStatus(list(counted.proposed), list(counted.accepted), counted.num_drafts)

    def tiers(self) -> list[TierStatus]:
        return tiers(self.manager, self._page_bytes)

    def attach_and_wait(self, url: str) -> None:
        attach_and_wait(self.manager, self._executor.workers, url, self._clock)

    # ---- inside ---------------------------------------------------------------------------------

    def _namespace_for(self, salt: str) -> Namespace:
        """Of a request that arrives."""
        if not self._private_prefixes:
            return self.namespace_of(salt)
        self._num_private += 1
        return self.namespace_of(f"{salt}\0{self._num_private}")

    def _problem(self, message: Generate) -> str:
        """Why a request cannot be taken; the server has said so more kindly before."""
        tokens, said = ids_of(message.tokens), ids_of(message.said)
        if tokens is None or said is None or not len(tokens):
            return "the prompt has no tokens"
        together = np.concatenate([tokens, said])
        if together.min() < 0 or together.max() >= self.info.vocab_size:
            return f"token ids must be in 0..{self.info.vocab_size - 1}"
        if message.params.max_tokens <= len(said):
            return "max_tokens must be at least 1, and more than there are already"
        wanted = len(tokens) + message.params.max_tokens
        if wanted > self.info.max_context:
            return f"{wanted} tokens asked for, the context holds {self.info.max_context}"
        return self._prefill_problem(message.prefill)

    def _prefill_problem(self, addresses: list[str]) -> str:
        if addresses and self.info.role != Role.DECODE:
            return "prefill servers are asked by decode servers, and this is none"
        try:
            for address in addresses:
                if split_address(address)[0] != "tcp":
                    return f"{address}: prefill servers are reached over tcp"
        except ConfigError as error:
            return str(error)
        return ""

    def _take_in(self, landed: Landed) -> None:
        """What the model computed. If it could not, those requests fail and the loop goes on."""
        batch, outcome = landed.batch, landed.outcome
        self._seconds["model"] += landed.seconds
        self._unchecked = True
        if isinstance(outcome, Exception):
            traceback.print_exception(outcome)
            reason = f"the model failed: {type(outcome).__name__}: {outcome}"
            self._outputs += self.scheduler.fail(batch, reason)
            return
        # Decoding, and the short tail after a hit, take much longer per token and say nothing
        # about a prompt that would be recomputed.
        if 2 * batch.num_tokens >= self.scheduler.chunk_tokens:
            self.manager.costs.observe_prefill(batch.num_tokens, landed.seconds)
        if self.scheduler.drafting is not None:
            # What the loop does between two batches counts; waiting for somebody to ask does not.
            seconds = min(landed.turn_s, _MOST_OF_A_TURN * landed.seconds)
            self.scheduler.drafting.timed(batch, seconds)
        self._outputs += self.scheduler.complete(batch, outcome)
        self._observe_lengths()

    def _observe_lengths(self) -> None:
        lengths = self.scheduler.take_lengths()
        if self._lengths is not None:
            for length in lengths:
                self._lengths.observe(length)

    def _check_when_idle(self) -> None:
        if not self._unchecked or len(self.scheduler) or not self.manager.idle:
            return
        began = now = self._clock()
        if now < self._next_check_s:
            return
        if self._checking is None or self._checked_at != self.manager.activity:
            self._checking, self._checked_at = self.manager.checking(), self.manager.activity
        while now < began + _CHECK_PIECE_S:
            if next(self._checking, self) is self:  # all of it
                self._checking, self._unchecked = None, False
                break
            now = self._clock()
        self._next_check_s = now + (self._clock() - began) / _CHECK_SHARE
