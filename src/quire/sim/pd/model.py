"""SimModel: plays the model over simulated pages, and checks every page before it is read.

An Executor for the real engine. A sequence's state is one number (quire.sim.content), and so is
what a page holds after the last unit that was written into it; the next token is a function of
that number. A wrong page is remembered in `broken`, because the engine takes an exception for a
model that failed.

In a namespace of pairs there is a draft head too: what a page holds depends on the token after it,
which is known or drawn in the very step that fills the page. What was computed for proposals that
are rejected is written behind what counts, and it is as if nothing were there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random

import msgspec
import zmq

from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult, verified
from quire.engine.request import Request
from quire.engine.sampling import Sampled
from quire.keys import Namespace, UnitKind
from quire.messages import Command, Completion, encode
from quire.sim.compute import FULL, RECURRENT, WINDOW
from quire.sim.content import Oracle, Pools
from quire.sim.report import SimulationError
from quire.sim.workers import SimWorkers
from quire.sim.workload import ALPHABET
from quire.store.account import StoreAccount
from quire.types import NO_SLOT, PageIds, RequestId, Tier, page_array, page_ids

_TOKEN_BYTES = 4
_GARBAGE = -1
"""Drawn by a model that went on from nothing."""


def next_token(content: int) -> int:
    """What the model answers, in a state."""
    return blake2b(content.to_bytes(8, "little"), digest_size=2).digest()[0] % ALPHABET


def answer(oracle: Oracle, namespace: Namespace, tokens: Sequence[int], count: int) -> list[int]:
    """What the model answers to a prompt, without any cache."""
    data = b"".join(t.to_bytes(_TOKEN_BYTES, "little") for t in tokens)
    found: list[int] = []
    for _ in range(count):
        token = said(oracle, namespace, data)
        found.append(token)
        data += token.to_bytes(_TOKEN_BYTES, "little")
    return found


def said(oracle: Oracle, namespace: Namespace, tokens: bytes) -> int:
    """The model's next token: the same whatever the units are in which its prefixes are named."""
    if namespace.unit is not UnitKind.TOKEN:
        namespace = replace(namespace, unit=UnitKind.TOKEN)
    return next_token(oracle.after(namespace, tokens))


class TracedWorkers:
    """SimWorkers as the engine sees them; all that is said goes into the trace."""

    def __init__(self, workers: SimWorkers, num_ranks: int, trace: Callable[[bytes], None]) -> None:
        self.num_ranks = num_ranks
        self.peer_addresses = [""] * num_ranks
        self._workers = workers
        self._trace = trace

    @property
    def news(self) -> list[int | zmq.Socket[bytes]]:
        return []

    def peer_counters(self) -> dict[str, int]:
        return {}

    def submit(self, commands: list[Command]) -> None:
        if commands:
            self._trace(encode(commands))
        self._workers.submit(commands)

    def poll(self) -> list[Completion]:
        reports = self._workers.poll()
        if reports:
            self._trace(encode(reports))
        return reports

    def close(self) -> None:
        self._workers.kill()


class SimModel:
    def __init__(
        self,
        oracle: Oracle,
        request: Callable[[RequestId], Request | None],
        pools: Pools,
        workers: SimWorkers,
        *,
        page_size: int,
        window_tokens: int,
        may_compute: Callable[[RequestId], bool],
        overlaps: bool,
        rng: Random,
        trace: Callable[[bytes], None],
    ) -> None:
        """`request`: what is known of one. `window_tokens`: those before a token that it sees in
        window layers; 0: no such. `may_compute`: else all full pages of a prompt come from
        elsewhere."""
        self._oracle = oracle
        self._request = request
        self._pools = pools
        self._sim = workers
        self._page_size = page_size
        self._window_tokens = window_tokens
        self._may_compute = may_compute
        self.overlaps = overlaps
        self._rng = rng
        self.workers = TracedWorkers(workers, pools.num_ranks, trace)
        self.broken: SimulationError | None = None
        self._landing: deque[BatchResult] = deque()
        self._drawn: list[int] = []
        """By the last batch launched, one per row."""
        self._void: set[tuple[RequestId, int]] = set()
        """Requests, each in its life, for which the last batch computed nothing of use."""
        self.checked_pages = 0
        self.computed_tokens = 0
        self.accepted_tokens = 0
        """Of those proposed."""
        self.rejected_tokens = 0

    def launch(self, batch: Batch) -> None:
        result = self._run_all(batch)
        self._landing.append(result)
        self._drawn = []
        for segment, found in zip(batch.segments, result.results, strict=True):
            if segment.row is not None:  # nobody goes on from what follows proposals
                self._drawn += [found.sampled.token if found.sampled else 0] * segment.num_rows

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        return self._landing.popleft()

    def _run_all(self, batch: Batch) -> BatchResult:
        own = [s.state for s in batch.segments if s.state != NO_SLOT]
        own += [s.save for s in batch.segments if s.save != NO_SLOT]
        try:
            if len(own) != len(set(own)) or set(own) & {s.restore for s in batch.segments}:
                raise SimulationError("two requests use one slot")
            void: set[tuple[RequestId, int]] = set()
            results = [self._run(segment, void) for segment in batch.segments]
            self._void = void
        except SimulationError as error:
            self.broken = self.broken or error
            raise
        return BatchResult(batch.number, results)

    def self_check(self) -> str:
        return ""

    def store_account(self) -> StoreAccount:
        return StoreAccount()

    def close(self) -> None:
        self.workers.close()

    # ---- a segment ------------------------------------------------------------------------------

    def _run(self, segment: Segment, void: set[tuple[RequestId, int]]) -> SegmentResult:
        """`void`: what it computes nothing of use for is added to it."""
        arrived = [self._sim.finish_load(op) for op in segment.loads]
        request = self._request(segment.id)
        if request is None:
            raise SimulationError(f"{segment.id} is computed and nobody asked for it")
        life = segment.id, request.life
        if not all(arrived):
            void.add(life)
            return SegmentResult(failed="a load failed")
        if life in self._void:
            void.add(life)
            return self._run_on_nothing(segment)
        start, known = segment.start, segment.num_tokens - segment.drafts
        tokens = request.tokens[: start + known].tobytes()
        own = known * _TOKEN_BYTES
        if segment.follows >= 0:
            if start != request.length:
                raise SimulationError(f"{segment.id} does not go on where it is")
            last = self._drawn[segment.follows].to_bytes(_TOKEN_BYTES, "little")
            tokens = tokens[: start * _TOKEN_BYTES] + last
        elif tokens[start * _TOKEN_BYTES :] != segment.tokens[:own]:
            raise SimulationError(f"{segment.id} computes other tokens than its own")
        if known > self._page_size and not self._may_compute(segment.id):
            raise SimulationError(f"{segment.id} computes what others should have computed for it")
        result = self._draw(segment, request.key.namespace, tokens + segment.tokens[own:])
        end = start + known + len(result.further)
        tokens = (tokens + segment.tokens[own:])[: end * _TOKEN_BYTES]
        if request.key.namespace.unit is UnitKind.PAIR:
            tokens += self._after(segment, request, result, end).to_bytes(_TOKEN_BYTES, "little")
        sequence = _Sequence(self._oracle, request.key.namespace, tokens)
        self._full(segment, sequence, start, end)
        if self._window_tokens:
            self._window(segment, sequence, start, end)
        if segment.state != NO_SLOT:
            self._state(segment, sequence, start, end)
        self.computed_tokens += segment.num_tokens
        self.accepted_tokens += len(result.further)
        self.rejected_tokens += segment.drafts - len(result.further)
        return result

    def _draw(self, segment: Segment, namespace: Namespace, tokens: bytes) -> SegmentResult:
        """What comes after its tokens, and as far as its proposals are right after these; and what
        may come then."""
        drawn = []
        for rejected in range(segment.num_rows - 1, -1, -1):
            known = tokens[: len(tokens) - rejected * _TOKEN_BYTES]
            drawn.append(Sampled(said(self._oracle, namespace, known)))
        if not drawn:
            return SegmentResult()
        proposed = [self._rng.randrange(ALPHABET) for _ in range(segment.ahead)]
        return msgspec.structs.replace(verified(segment, drawn), proposed=proposed)

    def _after(self, segment: Segment, request: Request, result: SegmentResult, end: int) -> int:
        """The second token of its last pair."""
        if segment.after >= 0:
            if segment.drafts or segment.after != request.tokens[end]:
                raise SimulationError(f"{segment.id} computes a pair with another's token")
            return segment.after
        drawn = [*([result.sampled] if result.sampled else []), *result.further]
        if not drawn:
            raise SimulationError(f"{segment.id} computes a pair of which it knows one token")
        return drawn[-1].token

    def _run_on_nothing(self, segment: Segment) -> SegmentResult:
        """It was launched before anybody heard that what it goes on from could not be computed:
        garbage, which nobody may take in."""
        scribble, at = self._pools.scribble_everywhere, segment.start // self._page_size
        scribble(page_array(segment.pages).tolist()[at:], FULL)
        if self._window_tokens:
            scribble(
                page_array(segment.window).tolist()[max(0, at - segment.window_first) :], WINDOW
            )
        for slot in (segment.state, segment.save):
            if slot != NO_SLOT:
                scribble([slot], RECURRENT)
        return SegmentResult(None if segment.row is None else Sampled(_GARBAGE))

    def _full(self, segment: Segment, sequence: _Sequence, start: int, end: int) -> None:
        pages = page_array(segment.pages).tolist()
        if len(set(pages)) != len(pages):
            raise SimulationError(f"{segment.id} has a page twice")
        there = start + segment.is_there  # then all that is computed first is there already
        self._check(segment, segment.pages, sequence.pages(0, there), FULL)
        first, last = there // self._page_size, -(-end // self._page_size)
        self._pools.compute(pages[first:last], sequence.pages(first, end), FULL)
        self._pools.scribble_everywhere(pages[last:], FULL)

    def _window(self, segment: Segment, sequence: _Sequence, start: int, end: int) -> None:
        size, at = self._page_size, segment.window_first
        seen = max(0, start - self._window_tokens) // size
        pages = page_array(segment.window).tolist()
        if start and at > seen:
            raise SimulationError(f"{segment.id} lacks pages of its window: {at} > {seen}")
        due = sequence.pages(at, start)
        self._check(segment, segment.window, due, WINDOW)
        first, last = max(at, start // size), -(-end // size)
        written = -(-(start + segment.num_tokens) // size)
        if written - at > len(pages):
            raise SimulationError(f"{segment.id} has no window pages for what it computes")
        self._pools.compute(pages[first - at : last - at], sequence.pages(first, end), WINDOW)
        self._pools.scribble_everywhere(pages[last - at : written - at], WINDOW)

    def _state(self, segment: Segment, sequence: _Sequence, start: int, end: int) -> None:
        slot, pools = segment.state, self._pools
        if segment.restore != NO_SLOT:
            pools.copy(segment.restore, slot, RECURRENT)
        elif start == 0:
            pools.scribble_everywhere([slot], RECURRENT)
        if start:
            self._check(segment, page_ids([slot]), [sequence.at(start)], RECURRENT)
        pools.compute([slot], [sequence.at(end)], RECURRENT)
        if segment.save != NO_SLOT:
            pools.copy(slot, segment.save, RECURRENT)

    def _check(self, segment: Segment, pages: PageIds, due: list[int], component: str) -> None:
        pages = PageIds(pages[: len(due) * _TOKEN_BYTES])
        if len(pages) < len(due) * _TOKEN_BYTES:
            raise SimulationError(f"{segment.id} lacks {component} pages")
        ranks = range(self._pools.num_ranks)
        wrong = self._pools.first_wrong(Tier.DEVICE, pages, due, ranks, component)
        self.checked_pages += len(due) * len(ranks)
        if wrong is not None:
            rank, index = wrong
            raise SimulationError(
                f"{segment.id} uses a wrong page: {component} {index} of {len(due)}, rank {rank}, "
                f"before token {segment.start}"
            )


class _Sequence:
    """What the pages of one sequence must contain. Of pairs, with one token more than units."""

    def __init__(self, oracle: Oracle, namespace: Namespace, tokens: bytes) -> None:
        self._overlap = namespace.unit.overlap
        self._oracle = oracle
        self._tokens = tokens
        self._root = oracle.register(namespace)
        self._size = namespace.page_size
        self._full = oracle.pages(namespace, tokens)

    def at(self, count: int) -> int:
        """After `count` units."""
        full = count // self._size
        before = self._full[full - 1] if full else self._root
        if count % self._size == 0:
            return before
        last = count + self._overlap
        rest = self._tokens[full * self._size * _TOKEN_BYTES : last * _TOKEN_BYTES]
        return self._oracle.page_after(before, rest)

    def pages(self, first: int, count: int) -> list[int]:
        """Pages from `first` on, when `count` units are written."""
        full = count // self._size
        pages = self._full[first:full]
        if count % self._size and first <= full:
            pages.append(self.at(count))
        return pages
