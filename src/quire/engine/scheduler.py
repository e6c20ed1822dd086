"""Scheduler: which requests take part in the next batch, with how many tokens, on which pages.

Knows requests and the cache's manager; neither the model nor the client. Who there is, and in which
order, is the queue's (queue.py); who of those that wait is let in, admission.py's; what is computed
for peers, for_peers.py's; what a request computes next, segments.py's. One step:

    schedule()   running requests first: those that decode, then chunks of prompts, oldest first;
                 what is left of the step's budget goes to waiting ones. Nobody waits for pages that
                 are on their way to another, as long as there is something else to compute
    complete()   take in what the model computed: share full pages, append tokens, end requests

A batch may be chosen while the one before it is still under way: it goes on from there, with
tokens that only the device knows yet. What was computed for a request that has ended meanwhile, or
begins again, is dropped. Nobody is preempted while a batch is under way, and nothing is proposed
for anybody: after proposals only the batch's end tells where a request goes on.

Under pressure those that wait yield their device pages; then the youngest running request is
preempted: its pages stay in the tree, are copied to the host as any others, and it starts again
from there. The oldest running request never gives way, so something always finishes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.engine.admission import Admission
from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult
from quire.engine.counters import SchedulerCounters
from quire.engine.draft.speculation import Speculation
from quire.engine.drafting import Drafting
from quire.engine.for_peers import ComputedForPeers
from quire.engine.grammar import Compiled, CompileStage, Grammars
from quire.engine.handovers import Handovers
from quire.engine.holds import Holds
from quire.engine.messages import Finish, Output, TokenLogprobs
from quire.engine.queue import Queue
from quire.engine.request import Request, State
from quire.engine.sampling import Sampled
from quire.engine.segments import Segments
from quire.manager import CacheManager, LoadState
from quire.types import NO_SLOT, RequestId, Tier

_FAILED = (Finish.ERROR, Finish.INVALID)
"""What was drawn last is no token."""


class _Part(NamedTuple):
    """A request's part in a batch under way."""

    request: Request
    life: int

    @property
    def is_wanted(self) -> bool:
        """False: the request has ended since, or begun again."""
        return self.request.life == self.life


class Scheduler:
    def __init__(
        self,
        manager: CacheManager,
        queue: Queue,
        *,
        chunk_tokens: int,
        reuse: bool = True,
        remote: Handovers | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`reuse` = False: every request computes its whole prompt, in one piece. `remote`: where
        to get pages from that are not here. `speculation`: who proposes tokens. `grammars`: who
        compiles what answers must follow; None: nobody."""
        self._manager = manager
        self._queue = queue
        self._remote = remote
        self._grammars = grammars
        self._compiling: dict[RequestId, Compiled] = {}
        """Of those that arrived since, until it is known what came of it."""
        self.reuse = reuse
        self.chunk_tokens = chunk_tokens
        self._page_size = manager.config.page_size
        pools = [p for p in manager.pools() if (p.component, p.tier) == ("recurrent", Tier.DEVICE)]
        num_slots = sum(pool.num_pages for pool in pools)
        self.can_go_ahead = not num_slots
        """May a batch be chosen before the one ahead of it was taken in? A recurrent state is kept
        or not by what came of the batch that it was computed in."""
        self._holds = Holds(manager, queue, remote, reuse=reuse)
        self._kept = ComputedForPeers(manager, queue, self._holds, num_slots=num_slots)
        self._admission = Admission(manager, queue, self._holds, self._kept, remote, reuse=reuse)
        self._segments = Segments(manager, self._kept, reuse=reuse)
        self.drafting = None if speculation is None else Drafting(speculation, self._segments)
        """None: nothing is proposed, and nothing that follows costs anything for it."""
        self._num_batches = 0
        self._lengths: list[int] = []
        self._under_way: dict[int, dict[RequestId, _Part]] = {}
        """By number of the batch: whose results will be taken in."""
        self._must_land = False
        """Somebody is to be preempted, when no batch is under way."""
        self.waits_for_tokens = False
        """Was no batch chosen because tokens of one under way must be known first?"""

    # ---- who there is ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> list[Request]:
        return self._queue.waiting

    @property
    def waiting_tokens(self) -> int:
        return self._queue.waiting_tokens

    @property
    def running(self) -> list[Request]:
        return self._queue.running

    @property
    def holding(self) -> list[Request]:
        return self._queue.holding

    @property
    def counters(self) -> SchedulerCounters:
        return self._queue.counters

    @property
    def is_full(self) -> bool:
        return self._queue.is_full

    @property
    def waits_for_peers(self) -> bool:
        """Is there nobody but those whose pages peers are to send, or to take?"""
        asking = self._remote.num_waiting if self._remote is not None else 0
        return len(self._queue) <= asking + len(self._queue.holding)

    def request(self, request_id: RequestId) -> Request | None:
        return self._queue.get(request_id)

    def requests(self) -> Iterable[Request]:
        return self._queue.requests()

    # ---- arrival and departure ------------------------------------------------------------------

    def add(self, request: Request) -> Output | None:
        """Queue it and start looking for its prefix. An Output: it was turned away."""
        self.counters.arrived += 1
        if self.request(request.id) is not None:
            return self._refused(request, Finish.ERROR, f"request {request.id} exists already")
        if self.is_full:
            reason = (
                f"{len(self.running)} requests are running and {len(self.waiting)} waiting: "
                "max_running and max_waiting allow no more"
            )
            return self._refused(request, Finish.REJECTED, reason)
        if request.params.grammar:
            if self._grammars is None:
                return self._refused(request, Finish.INVALID, "there are no grammars here")
            request.grammar = self._grammars.ask(request.params.grammar)
            self._compiling[request.id] = request.grammar
        self._queue.add(request)
        self._admission.arrived(request)
        return None

    def abort(self, request_id: RequestId) -> None:
        """Forget it, in any state. Unknown ones are ignored: they may just have finished."""
        request = self.request(request_id)
        if request is not None:
            if request.state is State.HOLDING:
                self.counters.handed_over += 1
            else:
                self.counters.aborted += 1
            self._remove(request)

    def expire(self) -> list[Output]:
        """End what is past its deadline."""
        outputs = []
        for request in self._queue.take_late():
            self.counters.timed_out += 1
            self._remove(request)
            error = f"not finished within {request.deadline_s - request.arrived_s:.4g} s"
            outputs.append(Output(request.id, [], finish=Finish.TIMEOUT, error=error))
        return outputs

    def refuse(self) -> list[Output]:
        """End what is to follow a grammar that cannot be compiled."""
        outputs = []
        for request_id, grammar in list(self._compiling.items()):
            if grammar.stage is CompileStage.PENDING:
                continue
            del self._compiling[request_id]
            request = self.request(request_id)
            if request is not None and grammar.stage is CompileStage.FAILED:
                self._remove(request)
                outputs.append(self._refused(request, Finish.INVALID, grammar.error))
        return outputs

    def fail(self, batch: Batch, reason: str) -> list[Output]:
        """End the requests of a batch: the model could not compute it."""
        outputs = []
        for part in self._under_way.pop(batch.number).values():
            if part.is_wanted:
                self._ended(part.request, Finish.ERROR)
                if not part.request.for_peer:
                    outputs.append(Output(part.request.id, [], finish=Finish.ERROR, error=reason))
        return outputs

    # ---- the step -------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next batch; None: nothing can be computed now, or before what is under way has
        ended."""
        self._num_batches += 1
        self._must_land = False
        self._admission.next_step()
        self._kept.settle()
        self._look_at_running()
        # Those whose pages are on their way come last. Inline: it is asked of all in each step.
        there = [r for r in self.running if r.flying or not (r.lease and r.lease.loads)]
        decoding = [r for r in there if r.remaining == 1]
        self.waits_for_tokens = self._must_know_tokens(decoding)
        if self.waits_for_tokens:
            return None
        chosen: dict[RequestId, Segment] = {}
        for request in decoding:
            self._continue(request, 1, chosen)
        # Those that decode come on top: a whole chunk is what attention is fastest with.
        budget = self.chunk_tokens - self._segments.tell(decoding, chosen)
        if self.drafting is not None:
            budget -= self.drafting.propose(decoding, budget - len(chosen), chosen)
        budget = max(budget, self._page_size)
        for request in [r for r in there if r.remaining > 1]:
            if budget > 0:
                budget -= self._continue(request, budget, chosen)
        if budget > 0:
            budget = self._begin_new(budget, chosen)
        if len(chosen) < len(self.running):
            self._wait_for_pages(budget, chosen)
        if not chosen or self._must_land:
            return None
        if self.drafting is not None:
            self.drafting.look_ahead(self.running, chosen)
        return self._begun(Batch(self._num_batches, list(chosen.values())))

    def _look_at_running(self) -> None:
        """What became of the pages that they waited for?"""
        for request in list(self.running):
            assert request.lease is not None
            if request.lease.load_state is LoadState.FAILED:  # before anything was computed on it
                self._restart(request)
            elif request.state is State.RESTORING:
                self._admission.go_on(request)
            elif request.lease.meeting is not None:
                self._holds.meet(request)

    def _begin_new(self, budget: int, chosen: dict[RequestId, Segment]) -> int:
        """Returns what is left of the budget."""
        for request in self._admission.admitted():
            if request.is_coming:
                continue
            count = self._segments.size(request, budget)
            # Else it goes on as those that run already.
            if count and self._segments.extend(request, count):
                chosen[request.id] = self._segments.make(request, count)
                budget -= count
            if budget <= 0:
                break
        return budget

    def _wait_for_pages(self, budget: int, chosen: dict[RequestId, Segment]) -> None:
        """Have the batch wait for pages on their way, layer by layer: where it computes so much
        else that they come meanwhile, or when there is nothing else to compute at all. Then for
        those alone that come first, as all in a batch wait for all of its pages."""
        coming = [r for r in self.running if r.is_coming and r.state is State.RUNNING]
        if not chosen and coming and not self._under_way:
            first = coming[0].lease
            coming = [r for r in coming if r.lease and first and r.lease.loads <= first.loads]
        elif 2 * budget > self.chunk_tokens or not chosen:
            return
        for request in coming:
            if budget > 0:
                budget -= self._continue(request, budget, chosen)

    def _begun(self, batch: Batch) -> Batch:
        self._under_way[batch.number] = under_way = {}
        num_rows, find = 0, self._queue.get
        for segment in batch.segments:
            request = find(segment.id)
            assert request is not None
            under_way[request.id] = _Part(request, request.life)
            request.flying += segment.num_tokens
            if segment.row is not None:
                request.draws += 1
                request.place = num_rows
                num_rows += 1 + segment.drafts
        if self.drafting is not None:
            self.drafting.begun(batch)
        return batch

    def complete(self, batch: Batch, result: BatchResult) -> list[Output]:
        """Take in what was computed. Every token of it is shared, reported, or thrown away."""
        outputs = []
        under_way = self._under_way.pop(batch.number)
        for segment, computed in zip(batch.segments, result.results, strict=True):
            part = under_way[segment.id]
            if not part.is_wanted:
                continue
            part.request.land(segment.num_tokens, drew=segment.row is not None)
            output = self._take_in(part.request, segment, computed)
            if output is not None:
                outputs.append(output)
        return outputs

    def take_lengths(self) -> list[int]:
        """Tokens of the sequences that have finished since the last call."""
        lengths, self._lengths = self._lengths, []
        return lengths

    # ---- choosing -------------------------------------------------------------------------------

    def _must_know_tokens(self, decoding: list[Request]) -> bool:
        """Is a batch under way without whose tokens nothing can be chosen, or proposed? Under a
        grammar each token says which may come next."""
        if not self._under_way:
            return False
        if any(request.held is not None and request.draws for request in decoding):
            return True
        drafting = self.drafting
        return drafting is not None and drafting.must_know_tokens(decoding, self._under_way)

    def _continue(self, request: Request, budget: int, chosen: dict[RequestId, Segment]) -> int:
        """Put tokens of a running request into the batch, if there is room for them."""
        if request.state is not State.RUNNING:  # preempted in this very step
            return 0
        count = self._segments.size(request, budget)
        if not count or not self._make_room(request, count, chosen):
            return 0
        chosen[request.id] = self._segments.make(request, count)
        return count

    def _make_room(self, request: Request, count: int, chosen: dict[RequestId, Segment]) -> bool:
        if self._segments.extend(request, count):
            return True
        for other in self._admission.holding_device():
            self._admission.yield_device(other)
            if self._segments.extend(request, count):
                return True
        # One at most in a step: its pages may still be on their way to the host.
        victim = next(r for r in reversed(self.running) if r.state is State.RUNNING)
        if victim is request or victim.id in chosen:
            return False
        if self._under_way:
            self._must_land = True
            return False
        self._preempt(victim)
        return self._segments.extend(request, count)

    def _preempt(self, request: Request) -> None:
        self.counters.preempted += 1
        self._holds.share(request)
        self._holds.begin_again(request)

    def _restart(self, request: Request) -> None:
        """It stands on pages that did not arrive."""
        self.counters.restarted += 1
        self._holds.begin_again(request)

    # ---- taking in ------------------------------------------------------------------------------

    def _take_in(
        self, request: Request, segment: Segment, computed: SegmentResult
    ) -> Output | None:
        lease = request.lease
        assert lease is not None
        if computed.failed or lease.load_state is LoadState.FAILED:
            self._restart(request)
            return None
        sampled = computed.sampled
        if sampled is None or request.for_peer:
            self._computed(request, segment, segment.num_tokens)
            if sampled is not None:
                self._kept.take(request)
            return None
        if segment.drafts:
            return self._take_several(request, segment, computed, [sampled, *computed.further])
        finish = request.failed() if sampled.error else request.append(sampled.token)
        self._computed(request, segment, segment.num_tokens)
        return self._output(request, segment, computed, [sampled], finish)

    def _take_several(
        self, request: Request, segment: Segment, computed: SegmentResult, drawn: list[Sampled]
    ) -> Output:
        """What was drawn after its last token and after proposals that were right, as far as its
        answer goes."""
        finish, count = None, 0
        while finish is None and count < len(drawn):
            sampled = drawn[count]
            finish = request.failed() if sampled.error else request.append(sampled.token)
            count += 1
        num_accepted = max(0, count - 1 - (finish in _FAILED))
        self._computed(request, segment, segment.num_tokens - segment.drafts + num_accepted)
        return self._output(request, segment, computed, drawn[:count], finish)

    def _computed(self, request: Request, segment: Segment, count: int) -> None:
        """The first `count` tokens of a segment are in its pages, and stay there."""
        lease = request.lease
        assert lease is not None
        if request.computed < request.num_prompt:
            left = request.num_prompt - request.computed
            self.counters.computed_prompt_tokens += min(count, left)
        request.computed += count
        if lease.state is not None and lease.state.recurrent is not None:
            lease.state.recurrent.restore = NO_SLOT
            if segment.save != NO_SLOT:
                self._manager.saved(lease, request.computed // self._page_size)
        self._holds.share(request)

    def _output(
        self,
        request: Request,
        segment: Segment,
        computed: SegmentResult,
        drawn: list[Sampled],
        finish: Finish | None,
    ) -> Output:
        """What its client hears of it. `drawn`: what is in its answer; an error ends it."""
        error = ""
        if finish in _FAILED:
            failed, held = drawn.pop(), request.held
            error = failed.error if held is None else held.error or failed.error
        cached, accepted, rejected = None, 0, 0
        if drawn and not request.reported:
            cached, request.reported = request.cached, True
        tokens = [sampled.token for sampled in drawn]
        counters = self._queue.counters
        counters.generated_tokens += len(tokens)
        if self.drafting is not None:
            accepted, rejected = self.drafting.heard(request, segment, computed, len(tokens))
        if finish is not None:
            self._ended(request, finish)
        logprobs = [] if request.params.logprobs is None else _logprobs(drawn)
        return Output(request.id, tokens, logprobs, finish, error, cached, accepted, rejected)

    # ---- ending ---------------------------------------------------------------------------------

    def _refused(self, request: Request, finish: Finish, reason: str) -> Output:
        self.counters.rejected += 1
        return Output(request.id, [], finish=finish, error=reason)

    def _ended(self, request: Request, finish: Finish) -> None:
        if finish in _FAILED:
            self.counters.failed += 1
        else:
            self.counters.finished += 1
            self._lengths.append(request.length)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self._queue.remove(request)
        self._admission.forget(request)
        self._holds.let_go(request)


def _logprobs(drawn: list[Sampled]) -> list[TokenLogprobs]:
    return [sampled.logprobs for sampled in drawn if sampled.logprobs is not None]
