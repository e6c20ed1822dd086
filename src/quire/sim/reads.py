"""PeerReads: what all ranks of an engine read from peers; a few threads each, a piece at a time.

    fetch ──▶ in line ──a thread is free──▶ a piece is read ──▶ at the end of the line, or ended

As quire.worker does it: who waits in line is not late; a piece that takes too long ends its fetch;
pages that fail do not keep back those after them. Where pages go and when is decided here; who may
read what is quire.sim.peers' business.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random

from quire.manager.operations import OperationKind
from quire.messages import Fetch, PeerSource
from quire.sim.bandwidth import SimPassage
from quire.sim.clock import VirtualClock
from quire.sim.content import Pools
from quire.sim.faults import Faults, statuses
from quire.sim.latency import Latency, moments
from quire.sim.peers import LineState, SimPeers
from quire.types import OperationId, PageStatus, Tier, page_array

Process = Generator[float, None, None]
"""Yields how long it waits."""
_Waiting = Generator[float, None, PageStatus | None]
"""It ends with a status if what it waited for comes to nothing."""

_THREADS = 4
_LOOK_EVERY_S = 0.25
"""How soon a read notices that it was cancelled or cut off."""


@dataclass(slots=True, eq=False)
class _Read:
    """One rank's part of a fetch."""

    rank: int
    command: Fetch
    source: PeerSource
    pages: list[int]
    at: int = 0
    """Pages before it are reported."""
    deadline_s: float = 0.0
    """Of the piece that is being read."""
    cancelled: bool = False


class PeerReads:
    def __init__(
        self,
        pools: Pools,
        peers: SimPeers,
        *,
        clock: VirtualClock,
        faults: Faults,
        latency: Latency,
        rng: Random,
        batch_pages: int,
        run: Callable[[int, Process], None],
        report: Callable[[int, Fetch, int, list[PageStatus], bool], None],
    ) -> None:
        """`run` starts a process of a rank; `report` hears (rank, command, first page, statuses,
        whether that is the last)."""
        self._pools = pools
        self._peers = peers
        self._clock = clock
        self._faults = faults
        self._latency = latency
        self._rng = rng
        self._batch_pages = batch_pages
        self._run = run
        self._report = report
        self._line: dict[int, deque[_Read]] = {rank: deque() for rank in range(pools.num_ranks)}
        self._running: dict[_Read, None] = {}
        self._num_running: Counter[int] = Counter()

    def start(self, rank: int, command: Fetch, source: PeerSource) -> None:
        pages = page_array(command.host).tolist()
        self._pools.scribble(rank, Tier.HOST, pages, command.component)
        self._line[rank].append(_Read(rank, command, source, pages))
        self._take(rank)

    def cancel(self, rank: int, op: OperationId) -> None:
        for read in [r for r in self._line[rank] if r.command.op == op]:
            self._line[rank].remove(read)
            self._end(read, PageStatus.CANCELLED)
        for read in self._running:
            read.cancelled |= read.rank == rank and read.command.op == op

    def _take(self, rank: int) -> None:
        while self._line[rank] and self._num_running[rank] < _THREADS:
            read = self._line[rank].popleft()
            self._running[read] = None
            self._num_running[rank] += 1
            self._run(rank, self._piece(read))

    def _piece(self, read: _Read) -> Process:
        end = min(read.at + self._batch_pages, len(read.pages))
        read.deadline_s = self._clock() + read.command.timeout_s
        outcome = yield from self._move(read, read.pages[read.at : end])
        del self._running[read]
        self._num_running[read.rank] -= 1
        if PageStatus.TIMEOUT in outcome or read.cancelled:
            self._end(read, PageStatus.CANCELLED if read.cancelled else PageStatus.TIMEOUT, outcome)
        else:
            self._report(read.rank, read.command, read.at, outcome, end == len(read.pages))
            read.at = end
            if end < len(read.pages):
                self._line[read.rank].append(read)
        self._take(read.rank)

    def _end(self, read: _Read, rest: PageStatus, outcome: list[PageStatus] | None = None) -> None:
        outcome = outcome or []
        outcome += [rest] * (len(read.pages) - read.at - len(outcome))
        self._report(read.rank, read.command, read.at, outcome, True)

    # ---- a piece --------------------------------------------------------------------------------

    def _move(self, read: _Read, pages: list[int]) -> Generator[float, None, list[PageStatus]]:
        """Into host pages: a status for each."""
        component = read.command.component
        outcome = statuses(self._faults.on_call(OperationKind.FETCH, read.rank), len(pages))
        whole_s = self._latency.store_s(read.rank)
        reading = self._peers.enter(read.source, component)
        if reading is None:
            yield whole_s * self._rng.random()
            return [PageStatus.MISS] * len(pages)
        passage = self._peers.passage(read.source, len(pages))
        read_s, write_s = moments(self._rng, whole_s)
        waits = [(read_s, passage), (write_s - read_s, None)]
        if self._rng.random() < 0.5:  # the bytes are on their way after they were read
            waits = [(read_s, None), (write_s - read_s, passage)]
        contents: list[int | None] = []
        try:
            for seconds, through in waits:
                stop = yield from self._wait(read, seconds, through)
                if stop is not None:
                    return [stop] * len(pages)
                first = read.source.first + read.at
                contents = contents or reading.contents(range(first, first + len(pages)))
        finally:
            reading.leave()
            passage.leave()
        for index, (page, content) in enumerate(zip(pages, contents, strict=True)):
            if outcome[index] is not PageStatus.OK:
                continue
            if content is not None:  # else what was read is garbage, and nobody could tell
                self._pools.write_shard(read.rank, page, content, component)
        yield whole_s - write_s
        return outcome

    def _wait(self, read: _Read, seconds: float, passage: SimPassage | None) -> _Waiting:
        """Let time pass, and the pages through."""
        until_s = self._clock() + seconds
        while True:
            line, now = self._peers.line(read.source), self._clock()
            left_s = max(until_s - now, passage.left_s() if passage is not None else 0.0)
            if line is LineState.CUT:
                return PageStatus.FAILED
            if read.cancelled or now >= read.deadline_s:
                return PageStatus.CANCELLED if read.cancelled else PageStatus.TIMEOUT
            if left_s <= 0 and line is LineState.UP:
                return None
            yield min(max(left_s, 0.01), _LOOK_EVERY_S, read.deadline_s - now)
