"""Scheduler: which requests take part in the next batch, with how many tokens, on which pages.

Knows requests and the cache's manager; neither the model nor the client. One step:

    schedule()   running requests first: those that decode, then chunks of prompts, oldest first;
                 what is left of the step's budget goes to waiting ones
    complete()   take in what the model computed: share full pages, append tokens, end requests

A batch may be chosen while the one before it is still under way: it goes on from there, with
tokens that only the device knows yet. What was computed for a request that has ended meanwhile, or
begins again, is dropped. Nobody is preempted while a batch is under way.

A waiting request holds a lease, taken at arrival so that its prefetch could start at once. Under
pressure the youngest of them yields its device pages first, never what is on its way to the host;
then the youngest running request is preempted: its pages stay in the tree, are copied to the host
as any others, and it starts again from there. The oldest running request never gives way, so
something always finishes.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult
from quire.engine.counters import SchedulerCounters
from quire.engine.handovers import Handovers
from quire.engine.messages import Finish, Output
from quire.engine.request import Origin, Request, State
from quire.manager import CacheManager, Lease, LeaseState, LoadState
from quire.types import NO_SLOT, PageIds, RequestId, Tier, num_pages

_RETRY_STEPS = 8
"""Steps between two tries to admit a request that did not fit."""
_LOOKUPS_PER_STEP = 8
"""Requests that were preempted, or begun again, and look again in one step."""

_SLOTS_TO_KEEP = 3
"""Of recurrent state: what a request begins from, works on, and leaves at the end of its prompt."""


class Scheduler:
    def __init__(
        self,
        manager: CacheManager,
        *,
        max_running: int,
        max_waiting: int,
        chunk_tokens: int,
        clock: Callable[[], float],
        reuse: bool = True,
    ) -> None:
        """`reuse` = False: every request computes its whole prompt, in one piece."""
        self.remote: Handovers | None = None
        """Where to get pages from that are not here; set when there are peers."""
        self._manager = manager
        self.reuse = reuse
        self._page_size = manager.config.page_size
        pools = [p for p in manager.pools() if (p.component, p.tier) == ("recurrent", Tier.DEVICE)]
        self._num_slots = sum(pool.num_pages for pool in pools)
        self._max_running = max_running
        self._max_waiting = max_waiting
        self.chunk_tokens = chunk_tokens
        self._clock = clock
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """Both in the order of arrival, higher priority first."""
        self.holding: list[Request] = []
        """Computed for peers, and kept until they have taken it."""
        self.counters = SchedulerCounters()
        self._requests: dict[RequestId, Request] = {}
        self._num_batches = 0
        self._retry_at = 0
        """Number of the batch before which nobody new is admitted; see _admit."""
        self._held_back: set[RequestId] = set()
        self._deadlines: list[tuple[float, RequestId]] = []
        self._lengths: list[int] = []
        self._under_way: dict[int, dict[RequestId, Request]] = {}
        """By number of the batch: whose results will be taken in."""
        self._must_land = False
        """Somebody is to be preempted, when no batch is under way."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def can_go_ahead(self) -> bool:
        """May a batch be chosen before the one ahead of it was taken in? A recurrent state is kept
        or not by what came of the batch that it was computed in."""
        return not self._num_slots

    # ---- arrival and departure ------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Has it as many requests as it may? Those that are computed for peers do not count."""
        return len(self._requests) - len(self.holding) >= self._max_waiting + self._max_running

    def add(self, request: Request) -> Output | None:
        """Queue it and start looking for its prefix. An Output: it was turned away."""
        self.counters.arrived += 1
        if request.id in self._requests:
            return self._refused(request, Finish.ERROR, f"request {request.id} exists already")
        if self.is_full:
            reason = (
                f"{len(self.running)} requests are running and {len(self.waiting)} waiting: "
                "max_running and max_waiting allow no more"
            )
            return self._refused(request, Finish.REJECTED, reason)
        request.order = (-request.priority, self.counters.arrived)
        self._requests[request.id] = request
        heapq.heappush(self._deadlines, (request.deadline_s, request.id))
        self._enqueue(request)
        self._look_up(request)
        for other in self.running:
            self._expect_branches(other, others=[request])
        return None

    def abort(self, request_id: RequestId) -> None:
        """Forget it, in any state. Unknown ones are ignored: they may just have finished."""
        request = self._requests.get(request_id)
        if request is not None:
            if request.state is State.HOLDING:
                self.counters.handed_over += 1
            else:
                self.counters.aborted += 1
            self._remove(request)

    def expire(self) -> list[Output]:
        """End what is past its deadline."""
        now, late = self._clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_s == deadline_s:
                late.append(request)
                self.counters.timed_out += 1
                self._remove(request)
        return [
            Output(
                request.id,
                [],
                finish=Finish.TIMEOUT,
                error=f"not finished within {now - request.arrived_s:.1f} s",
            )
            for request in late
        ]

    def request(self, request_id: RequestId) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def room_pages(self) -> int:
        """Device pages that running requests do not use."""
        used = sum(num_pages(r.lease.pages) for r in self.running if r.lease is not None)
        return self._manager.config.device_pages - used

    def take_failed(self) -> list[Output]:
        """End the requests whose pages cannot be had from anybody."""
        if self.remote is None:
            return []
        failed = [r for r in self.waiting if self.remote.failure(r)]
        outputs = []
        for request in failed:
            self.counters.unavailable += 1
            reason = self.remote.failure(request)
            self._remove(request)
            outputs.append(Output(request.id, [], finish=Finish.UNAVAILABLE, error=reason))
        return outputs

    def fail(self, batch: Batch, reason: str) -> list[Output]:
        """End the requests of a batch: the model could not compute it."""
        outputs = []
        for request in list(self._under_way.pop(batch.number).values()):
            output = self._finish(request, [], Finish.ERROR, reason)
            if not request.for_peer:
                outputs.append(output)
        return outputs

    # ---- the step -------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next batch; None: nothing can be computed now, or before what is under way has
        ended."""
        self._num_batches += 1
        self._must_land = False
        for request in [r for r in self.holding if not r.settled]:
            self._settle(request)
        for request in list(self.running):
            assert request.lease is not None
            if request.lease.load_state is LoadState.FAILED:  # before anything was computed on it
                self._restart(request)
            elif request.state is State.RESTORING:
                self._go_on(request)
        chosen: dict[RequestId, Segment] = {}
        for request in [r for r in self.running if r.remaining == 1]:
            self._continue(request, 1, chosen)
        budget = max(self.chunk_tokens - len(chosen), self._page_size)
        for request in [r for r in self.running if r.remaining > 1]:
            if budget > 0:
                budget -= self._continue(request, budget, chosen)
        if budget > 0 and self.waiting and self._num_batches >= self._retry_at:
            self._admit_waiting(budget, chosen)
        if not chosen or self._must_land:
            return None
        return self._begun(Batch(self._num_batches, list(chosen.values())))

    def _begun(self, batch: Batch) -> Batch:
        self._under_way[batch.number] = under_way = {}
        num_rows = 0
        for segment in batch.segments:
            request = self._requests[segment.id]
            under_way[request.id] = request
            request.flying += segment.num_tokens
            if segment.row is not None:
                request.draws += 1
                request.place = num_rows
                num_rows += 1
        return batch

    def complete(self, batch: Batch, result: BatchResult) -> list[Output]:
        """Take in what was computed. Every token of it is shared, reported, or thrown away."""
        outputs = []
        under_way = self._under_way.pop(batch.number)
        for segment, computed in zip(batch.segments, result.results, strict=True):
            request = under_way.pop(segment.id, None)
            if request is None:  # it ended, or begins again
                continue
            request.land(segment.num_tokens, drew=segment.row is not None)
            output = self._take_in(request, segment, computed)
            if output is not None:
                outputs.append(output)
        return outputs

    def take_lengths(self) -> list[int]:
        """Tokens of the sequences that have finished since the last call."""
        lengths, self._lengths = self._lengths, []
        return lengths

    # ---- choosing -------------------------------------------------------------------------------

    def _continue(self, request: Request, budget: int, chosen: dict[RequestId, Segment]) -> int:
        """Put tokens of a running request into the batch, if there is room for them."""
        if request.state is not State.RUNNING:  # preempted in this very step
            return 0
        count = self._chunk(request, budget)
        if not self._make_room(request, count, chosen):
            return 0
        chosen[request.id] = self._segment(request, count)
        return count

    def _chunk(self, request: Request, budget: int) -> int:
        """How many tokens of its prompt to compute next. A recurrent state can be kept where a
        batch ends and nowhere else, so chunks then end at page boundaries, and at checkpoints."""
        if not self.reuse:
            return request.remaining
        count = min(budget, request.remaining)
        lease, size = request.lease, self._page_size
        assert lease is not None
        if lease.state is None or lease.state.recurrent is None:
            return count
        start = request.next_start
        first, last = start // size, (start + count) // size
        if last == first:
            return count
        return self._manager.next_stop(lease, first, last) * size - start

    def _segment(self, request: Request, count: int) -> Segment:
        lease = request.lease
        assert lease is not None
        start, end = request.next_start, request.next_start + count
        follows = request.place if start == request.length else -1
        pages = lease.pages[: -(-end // self._page_size) * 4]
        segment = Segment(
            id=request.id,
            tokens=request.tokens[start:end].tobytes() if follows < 0 else bytes(4),
            start=start,
            pages=PageIds(pages),
            loads=sorted(lease.loads),
            row=request.row() if end == request.length + request.draws else None,
            follows=follows,
        )
        return segment if lease.state is None else self._with_state(segment, lease, lease.state)

    def _with_state(self, segment: Segment, lease: Lease, state: LeaseState) -> Segment:
        fields: dict[str, Any] = {}
        if state.window is not None:
            fields |= {"window": state.window.pages, "window_first": state.window.first}
        if state.recurrent is not None:
            end = segment.start + segment.num_tokens
            kept = self.reuse and end % self._page_size == 0
            fields |= {
                "state": state.recurrent.slot,
                "restore": state.recurrent.restore,
                "save": self._manager.save_slot(lease) if kept else NO_SLOT,
            }
        return msgspec.structs.replace(segment, **fields)

    def _make_room(self, request: Request, count: int, chosen: dict[RequestId, Segment]) -> bool:
        if self._extend(request, count):
            return True
        for other in self._holding_device():
            self._yield(other)
            if self._extend(request, count):
                return True
        # One at most in a step: its pages may still be on their way to the host.
        victim = next(r for r in reversed(self.running) if r.state is State.RUNNING)
        if victim is request or victim.id in chosen:
            return False
        if self._under_way:
            self._must_land = True
            return False
        self._preempt(victim)
        return self._extend(request, count)

    def _extend(self, request: Request, count: int) -> bool:
        """Have pages for the next `count` tokens."""
        lease, end = request.lease, request.next_start + count
        assert lease is not None
        missing = request.missing_pages(end, self._page_size)
        if missing > 0 and not self._manager.extend(lease, missing):
            return False
        if not self._manager.cover(lease, -(-end // self._page_size)):
            return False
        return not request.for_peer or end < request.length or self._can_keep(lease)

    def _can_keep(self, lease: Lease) -> bool:
        """Is there a place for the state at the end of a prompt? Without it a peer has no use for
        the rest."""
        can = lease.state is not None and self._num_slots >= _SLOTS_TO_KEEP
        if not can or not self._manager.config.snapshots.per_path:
            return True  # it never will be, or need not be
        return self._manager.save_slot(lease) != NO_SLOT

    def _holding_device(self, but: Request | None = None) -> list[Request]:
        """Waiting requests that may hold device pages, the youngest first; but those that get pages
        from a peer last."""
        found = [
            request
            for request in reversed(self.waiting)
            if (lease := request.lease) is not None
            and request is not but
            and not lease.yielded
            and lease.tail.end  # also of a part that it found on the host the device may have some
        ]
        return sorted(found, key=lambda request: request.handover is not None)

    def _yield(self, request: Request) -> None:
        assert request.lease is not None
        self._manager.yield_device(request.lease)
        self.counters.yielded += 1

    def _preempt(self, request: Request) -> None:
        self.counters.preempted += 1
        self._share(request)
        self._requeue(request)

    def _restart(self, request: Request) -> None:
        """It stands on pages that did not arrive."""
        self.counters.restarted += 1
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """From running back to waiting, with all its tokens and without its pages."""
        self.running.remove(request)
        self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        self._let_go(request)
        request.state = State.WAITING
        request.computed = 0
        self._enqueue(request)

    # ---- admitting ------------------------------------------------------------------------------

    def _admit_waiting(self, budget: int, chosen: dict[RequestId, Segment]) -> None:
        lookups = _LOOKUPS_PER_STEP
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self._max_running:
                return
            if request.lease is None:
                if lookups == 0:
                    return
                lookups -= 1
                self._look_up(request)
            assert request.lease is not None
            if self.remote is not None and not self.remote.ready(request):
                continue
            if not self._manager.ready(request.lease):
                continue
            if request.for_peer and self._is_all_there(request):
                continue
            if self._is_being_computed(request):
                if request.id not in self._held_back:
                    self._held_back.add(request.id)
                    self.counters.shared_waits += 1
                continue
            if not self._admit(request):
                # Nobody may overtake it, or a long prompt would wait for ever.
                self._retry_at = self._num_batches + _RETRY_STEPS if self.running else 0
                return
            if request.state is State.RESTORING:
                continue
            count = self._chunk(request, budget)
            if self._extend(request, count):  # else it goes on as those that run already
                chosen[request.id] = self._segment(request, count)
                budget -= count

    def _look_up(self, request: Request) -> None:
        """Take a lease on what there is, and start fetching what the store may have."""
        manager, key = self._manager, request.lookup_key()
        match = manager.match(key if self.reuse else key[:0])
        if self.remote is not None:
            match = self.remote.usable(match)
        again = request.origin is not None
        if not again:
            request.origin = Origin(match.num_device, match.num_pages)
        request.lease = manager.acquire(match, request.id, priority=request.priority, again=again)
        if self.remote is not None and self.remote.begin(request):
            return
        if self.reuse:
            manager.prefetch(request.lease)

    def _is_all_there(self, request: Request) -> bool:
        """For a peer, and nothing is left to compute: it need not even come to the device."""
        assert request.lease is not None
        if self._manager.admit(request.lease) < request.key.last:
            return False
        if request.origin is not None:
            request.origin.later_device = self._manager.match(request.lease.key).num_device
        self._note_found(request, request.key.last)
        self.waiting.remove(request)
        self._hold(request)
        return True

    def _hold(self, request: Request) -> None:
        """All is computed: keep it until the peer has taken it."""
        request.state = State.HOLDING
        self.holding.append(request)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Keep its pages in the tree, and nothing else, as soon as all of them are there."""
        manager, before = self._manager, request.lease
        assert before is not None
        if before.load_state is LoadState.FAILED:  # it stands on pages that did not arrive
            self.counters.restarted += 1
            self.holding.remove(request)
            self._begin_again(request)
            return
        self._share(request)
        if before.loads:
            return
        request.lease = manager.acquire(manager.match(request.key), request.id, again=True)
        manager.release(before)
        request.settled = True
        if request.lease.tail.end < request.key.last:
            request.failure = "there was no room to keep the state at the end of the prompt"

    def _is_being_computed(self, request: Request) -> bool:
        """Is somebody computing pages of this prompt that are not there yet?"""
        lease = request.lease
        assert lease is not None
        have = lease.num_device + lease.num_host
        for other in self.running if self.reuse else ():
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
        if lease is None or lease.state is None or not self.reuse:
            return
        for other in others:
            if other.lease is not None and other is not computing:
                common = computing.key.common_pages(other.key)
                if common > other.lease.num_device + other.lease.num_host:
                    self._manager.expect_branch(lease, common)

    def _admit(self, request: Request) -> bool:
        """Give it its pages, all that the prompt needs and the first for the answer."""
        manager, lease = self._manager, request.lease
        assert lease is not None
        have, handover = manager.admit(lease), request.handover
        if handover is not None and handover.compute and have < handover.wanted:
            self._let_go(request)  # what it yielded is gone: it is got again
            return False
        on_device = manager.match(lease.key).num_device
        if request.origin is not None:
            request.origin.later_device = on_device
        if not self._has_room(request, on_device) and self.running:
            return False
        manager.load(lease)
        others = iter(self._holding_device(but=request))
        while not self._give(request):  # states and windows may be short where pages are not
            other = next(others, request)
            self._yield(other)
            if other is request:
                return False
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_order)
        request.state = State.RESTORING
        if request.handover is not None:
            self._note_found(request, lease.num_device)
        if not (self.reuse and manager.stream(lease)):
            self._go_on(request)
        if self.remote is not None:
            self.remote.admitted(request)
        self.counters.admitted += 1
        self._held_back.discard(request.id)
        self._expect_branches(request, others=self.waiting)
        return True

    def _has_room(self, request: Request, on_device: int) -> bool:
        """Are there device pages for all of its prompt, if others that wait yield theirs? The first
        `on_device` are there, whether it counts them as its own or not."""
        missing = -(-request.room_tokens // self._page_size) - on_device
        for other in self._holding_device(but=request):
            if missing <= self._manager.room():
                break
            self._yield(other)
        return missing <= self._manager.room()

    def _give(self, request: Request) -> bool:
        """The pages a prompt lacks, and a state to work on."""
        manager, lease = self._manager, request.lease
        assert lease is not None
        if request.handover is not None and request.handover.compute and lease.num_host:
            manager.load(lease)  # there was no room for all of it
            if lease.num_host:
                return False  # it was not got from a peer to be computed here
        if not manager.begin(lease):
            return False
        missing = request.missing_pages(request.room_tokens, self._page_size)
        return missing <= 0 or manager.extend(lease, missing)

    def _go_on(self, request: Request) -> None:
        """Compute, if all that is to come through the host has come."""
        lease = request.lease
        assert lease is not None
        if lease.stream is None:
            request.state = State.RUNNING
            request.computed = lease.num_device * self._page_size
            self._note_found(request, lease.num_device)

    def _note_found(self, request: Request, reused: int) -> None:
        """When it is first admitted: where its first `reused` pages were."""
        if request.cached is not None or request.origin is None:
            return
        request.origin.look(request.lease)
        request.cached = request.origin.cached(reused, self._page_size)
        if self.remote is not None:
            request.cached = self.remote.found(request) or request.cached

    # ---- taking in ------------------------------------------------------------------------------

    def _take_in(
        self, request: Request, segment: Segment, computed: SegmentResult
    ) -> Output | None:
        lease = request.lease
        assert lease is not None
        if computed.failed or lease.load_state is LoadState.FAILED:
            self._restart(request)
            return None
        prompt_tokens = min(segment.num_tokens, max(0, request.num_prompt - request.computed))
        self.counters.prompt_tokens += prompt_tokens
        request.computed += segment.num_tokens
        if lease.state is not None and lease.state.recurrent is not None:
            lease.state.recurrent.restore = NO_SLOT
            if segment.save != NO_SLOT:
                self._manager.saved(lease, request.computed // self._page_size)
        self._share(request)
        sampled = computed.sampled
        if sampled is None:
            return None
        if request.for_peer:
            self.running.remove(request)
            self._hold(request)
            return None
        if sampled.error:
            return self._finish(request, [], Finish.ERROR, sampled.error)
        request.append(sampled.token)
        self.counters.generated_tokens += 1
        logprobs = [sampled.logprobs] if sampled.logprobs is not None else []
        finish = None
        if sampled.token in request.params.stop_ids:
            finish = Finish.STOP
        elif request.num_output >= request.params.max_tokens:
            finish = Finish.LENGTH
        cached = None if request.reported else request.cached
        request.reported = True
        if finish is not None:
            self.counters.finished += 1
            self._lengths.append(request.length)
            self._remove(request)
        return Output(request.id, [sampled.token], logprobs, finish, "", cached)

    def _share(self, request: Request) -> None:
        """Commit the full pages computed so far, so that others can use them."""
        lease = request.lease
        assert lease is not None
        full_pages = request.computed // self._page_size
        if self.reuse and full_pages > lease.num_device:
            # Not a page more: the request has pages for tokens that are still to be computed.
            self._manager.commit(lease, request.key_of(request.computed)[:full_pages])

    # ---- ending ---------------------------------------------------------------------------------

    def _refused(self, request: Request, finish: Finish, reason: str) -> Output:
        self.counters.rejected += 1
        return Output(request.id, [], finish=finish, error=reason)

    def _finish(self, request: Request, tokens: list[int], finish: Finish, error: str) -> Output:
        self.counters.failed += 1
        self._remove(request)
        return Output(request.id, tokens, finish=finish, error=error)

    def _remove(self, request: Request) -> None:
        del self._requests[request.id]
        self._held_back.discard(request.id)
        running, holding = self.running, self.holding
        queues = {State.RUNNING: running, State.RESTORING: running, State.HOLDING: holding}
        queues.get(request.state, self.waiting).remove(request)
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if self.remote is not None:
            self.remote.cancel(request)
        request.ground()
        for under_way in self._under_way.values():
            under_way.pop(request.id, None)
        if request.lease is not None:
            if request.origin is not None:
                request.origin.look(request.lease)
            self._manager.release(request.lease)
            request.lease = None
            self._retry_at = 0

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_order)


def _order(request: Request) -> tuple[int, int]:
    return request.order
