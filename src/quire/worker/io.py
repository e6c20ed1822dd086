"""The I/O operations of a worker: write and fetch page by page, probe a batch of prefixes.

Knows one operation at a time: its pages, its deadline, its store. Does not know queues (lanes.py)
or which operations exist (worker.py).

    QUEUED ──a thread takes a piece──▶ RUNNING ──last thread out, more left──▶ QUEUED
       │                                  └──last thread out, nothing left or stopped──▶ FINISHED
       └──cancelled, past its deadline, lane closed──▶ FINISHED

Stopped: at a fetch's first miss, by an error, when cancelled or past the deadline. Entering
FINISHED gives back what was borrowed (the store) and sends the one final report. While RUNNING the
store or peer may be writing into the pages, so stopping waits for the pieces under way: only the
final report says that the pages may be reused.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.memory.host import HostPool
from quire.messages import Completion, Fetch, Probe, Probed, Touch, Transferred, Write
from quire.store.base import STEP_NS, Part
from quire.types import PAGE_KEY_BYTES, PageKey, PageStatus, page_array, split_keys
from quire.worker.attachment import StoreLease

Clock = Callable[[], float]
"""Monotonic seconds."""

_UNKNOWN = 255
"""In place of a status: not moved yet."""


class TaskState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where an operation's news go."""

    rank: int
    report: Callable[[Completion], None]
    count_error: Callable[[Exception], None]
    """An exception ended an operation."""


class IoTask(ABC):
    """State machine above; subclasses say what a piece is and what the final report is."""

    wide = False
    holds_pages = True
    """False: nobody minds if a thread is still inside when it is over."""

    def __init__(
        self,
        deadline: float,
        clock: Clock,
        reporter: Reporter,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """`let_go` gives back what was borrowed for the operation."""
        self._let_go = let_go
        self._deadline = deadline
        self._clock = clock
        self._reporter = reporter
        self._state = TaskState.QUEUED
        self._num_running = 0
        self._stop: PageStatus | None = None
        """Why no further piece is taken, and the status of what is left."""
        self._lock = threading.Lock()

    @property
    def state(self) -> TaskState:
        return self._state

    @property
    def is_cancelled(self) -> bool:
        return self._stop is PageStatus.CANCELLED

    def take(self) -> Callable[[], None] | None:
        with self._lock:
            if self._state is TaskState.FINISHED or self._stop is not None:
                return None
            work = self._next_piece() if self._clock() < self._deadline else None
            if work is not None:
                self._num_running += 1
                self._state = TaskState.RUNNING
                return lambda: self._run(work)
        self.expire(self._clock())
        return None

    @property
    def has_more(self) -> bool:
        return self._stop is None and not self._is_complete()

    def cancel(self) -> None:
        self._halt(PageStatus.CANCELLED)

    def expire(self, now: float) -> None:
        """End it if its deadline has passed, whether or not a thread was free to take it."""
        if now >= self._deadline:
            self._halt(PageStatus.TIMEOUT)

    def fail(self, error: Exception) -> None:
        """A piece raised."""
        self._reporter.count_error(error)
        with self._lock:
            self._stop = self._stop or PageStatus.FAILED
        self._leave()

    def reject(self) -> None:
        """No room in the queue: it was never taken on."""
        self._halt(PageStatus.REJECTED)

    def abandon(self) -> None:
        self._halt(PageStatus.CANCELLED)

    def _run(self, work: Callable[[], None]) -> None:
        work()
        self._leave()

    def _halt(self, rest: PageStatus) -> None:
        """Take no further piece, and end it unless pages are in use."""
        with self._lock:
            if self._state is TaskState.FINISHED:
                return
            self._stop = self._stop or rest
            if self._num_running and self.holds_pages:
                return
            self._state = TaskState.FINISHED
            idle = self._num_running == 0
        self._end(idle=idle)

    def _leave(self) -> None:
        """A thread is done with its piece. The last one out ends the operation, or queues it."""
        with self._lock:
            self._num_running -= 1
            idle = self._num_running == 0
            over = self._state is TaskState.FINISHED
            if not over and not (idle and (self._stop is not None or self._is_complete())):
                self._state = TaskState.QUEUED if idle else self._state
                return
            self._state = TaskState.FINISHED
        if over:  # it was reported while this thread was inside
            self._give_back(idle=idle)
            return
        self._used()
        self._end(idle=idle)

    def _end(self, *, idle: bool) -> None:
        # What is held goes first: whoever sees the final report may count on it being free.
        self._give_back(idle=idle)
        self._final_report()

    def _give_back(self, *, idle: bool) -> None:
        if idle and self._let_go is not None:
            self._let_go()

    def _used(self) -> None:  # noqa: B027 - most use none
        """It is over, and a thread of the lane is here: say which pages were used."""

    @abstractmethod
    def _next_piece(self) -> Callable[[], None] | None:
        """The next bounded piece of the work; None: all were taken. Called under the lock."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Were all pieces taken?"""

    @abstractmethod
    def _final_report(self) -> None:
        """Send the final report; what was not done has the status `_stop`."""


class PageTask(IoTask):
    """A write or a fetch, in batches; reported in order."""

    def __init__(
        self,
        command: Write | Fetch,
        *,
        batch_pages: int,
        deadline: float,
        clock: Clock,
        reporter: Reporter,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """The command's pages have been checked."""
        super().__init__(deadline, clock, reporter, let_go)
        self._command = command
        self._batch_pages = batch_pages
        self._pages = page_array(command.host)
        # Pages [0, first) have been reported, [0, taken) were given to threads.
        self._statuses = bytearray([_UNKNOWN]) * len(self._pages)
        self._first = 0
        self._taken = 0
        self._reported_at: float | None = None

    def _next_piece(self) -> Callable[[], None] | None:
        first = self._taken
        if first == len(self._pages):
            return None
        self._taken = end = min(first + self._batch_pages, len(self._pages))
        return lambda: self._piece(first, end)

    def _is_complete(self) -> bool:
        return self._taken == len(self._pages)

    def _piece(self, first: int, end: int) -> None:
        if self._reported_at is None:
            self._reported_at = self._clock()
        statuses = self._move(first, end)
        if len(statuses) != end - first:
            raise ValueError(f"{len(statuses)} of {end - first} pages answered")
        with self._lock:
            self._statuses[first:end] = bytes(statuses)
            self._stop = self._stop or self._stops_at(statuses)
            known = self._num_known()
            if known > self._first and known < len(self._pages) and self._stop is None:
                self._send(known, final=False)

    def _num_known(self) -> int:
        """Leading pages whose status is known."""
        known = self._statuses.find(_UNKNOWN, self._first)
        return len(self._pages) if known < 0 else known

    @abstractmethod
    def _move(self, first: int, end: int) -> list[PageStatus]:
        """Move pages [first, end) of the command; a status for each."""

    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        """Not None: the pages behind these are not tried, and this is their status."""
        del statuses
        return None

    def _final_report(self) -> None:
        rest = self._stop if self._stop is not None else PageStatus.FAILED
        self._statuses = self._statuses.replace(bytes([_UNKNOWN]), bytes([rest]))
        self._send(len(self._pages), final=True)

    def _send(self, end: int, *, final: bool) -> None:
        now = self._clock()
        self._reporter.report(
            Transferred(
                op=self._command.op,
                rank=self._reporter.rank,
                component=self._command.component,
                first=self._first,
                statuses=bytes(self._statuses[self._first : end]),
                final=final,
                seconds=0.0 if self._reported_at is None else now - self._reported_at,
            )
        )
        self._first = end
        self._reported_at = now


class StoreTask(PageTask):
    """A write to the store, or a fetch from it. The pages of a fetch come in any order; those of a
    write go in order, so that a page is not there before the one that it needs."""

    def __init__(
        self,
        command: Write | Fetch,
        *,
        part: Part,
        host: HostPool,
        batch_pages: int,
        lease: StoreLease,
        deadline: float,
        clock: Clock,
        used_ns: int,
        reporter: Reporter,
        let_go: Callable[[], None],
    ) -> None:
        """The command's pages and keys have been checked."""
        super().__init__(
            command,
            batch_pages=batch_pages,
            deadline=deadline,
            clock=clock,
            reporter=reporter,
            let_go=let_go,
        )
        self.wide = isinstance(command, Fetch)
        self._part = part
        self._host = host
        self._store = lease.store
        self._used_ns = used_ns
        self._keys = split_keys(command.keys)
        self._parents = split_keys(command.parents) if isinstance(command, Write) else []

    def _move(self, first: int, end: int) -> list[PageStatus]:
        keys = self._keys[first:end]
        views = [self._host.page_view(page) for page in self._pages[first:end].tolist()]
        if isinstance(self._command, Fetch):
            return self._store.get(
                self._part,
                keys,
                views,
                deadline=self._deadline,
                cancelled=lambda: self.is_cancelled,
                touch=False,
            )
        return self._store.put(
            self._part,
            keys,
            views,
            deadline=self._deadline,
            parents=self._parents[first:end],
            used_ns=self._used_ns - first * STEP_NS,
            cancelled=lambda: self.is_cancelled,
        )

    def _used(self) -> None:
        if isinstance(self._command, Fetch):
            came = len(self._statuses) - len(self._statuses.lstrip(bytes([PageStatus.OK])))
            self._store.touch(self._part, self._keys[:came], used_ns=self._used_ns)

    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        """A prefix ends at its first missing page, so a fetch has no use for those behind it."""
        if isinstance(self._command, Write):
            return None
        bad = next((status for status in statuses if status is not PageStatus.OK), None)
        if bad in (None, PageStatus.TIMEOUT, PageStatus.CANCELLED):
            return bad
        return PageStatus.MISS


class ProbeTask(IoTask):
    """What of each query is in L3: one question to the store for all of them."""

    holds_pages = False

    def __init__(
        self,
        command: Probe,
        *,
        part: Part,
        lease: StoreLease,
        deadline: float,
        clock: Clock,
        reporter: Reporter,
    ) -> None:
        super().__init__(deadline, clock, reporter, lease.release)
        self._command = command
        self._part = part
        self._lease = lease
        self._asked = False
        self._answer = nothing_there(command)

    def _next_piece(self) -> Callable[[], None] | None:
        if self._asked:
            return None
        self._asked = True
        return self._ask

    def _is_complete(self) -> bool:
        return self._asked

    def _ask(self) -> None:
        queries = [split_keys(query) for query in self._command.queries]
        answer = self._for_each(queries) if self._command.each else self._for_prefix(queries)
        with self._lock:
            if self._state is TaskState.RUNNING:
                self._answer = answer

    def _for_prefix(self, queries: list[list[PageKey]]) -> dict[str, Any]:
        hits = self._lease.store.contains_prefix(self._part, queries, deadline=self._deadline)
        if len(hits) != len(queries):
            raise ValueError(f"store answered {len(hits)} of {len(queries)} queries")
        return {
            "hits": [max(0, min(hit, len(query))) for hit, query in zip(hits, queries, strict=True)]
        }

    def _for_each(self, queries: list[list[PageKey]]) -> dict[str, Any]:
        present = self._lease.store.contains_each(self._part, queries, deadline=self._deadline)
        if list(map(len, present)) != list(map(len, queries)):
            raise ValueError(f"store answered {len(present)} of {len(queries)} queries")
        return {"present": present}

    def _final_report(self) -> None:
        # No answer in time, or none wanted any more: nothing is promised.
        command = self._command
        self._reporter.report(
            Probed(command.op, self._reporter.rank, command.component, **self._answer)
        )


class TouchTask:
    """Pages used in other tiers. Nobody is told."""

    wide = False
    has_more = False

    def __init__(
        self, command: Touch, *, part: Part, lease: StoreLease, used_ns: int, reporter: Reporter
    ) -> None:
        self._command = command
        self._part = part
        self._lease: StoreLease | None = lease
        self._used_ns = used_ns
        self._reporter = reporter

    def take(self) -> Callable[[], None] | None:
        return None if self._lease is None else self._touch

    def fail(self, error: Exception) -> None:
        self._reporter.count_error(error)

    def abandon(self) -> None:
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _touch(self) -> None:
        assert self._lease is not None
        keys, each = split_keys(self._command.keys), self._command.each
        try:
            self._lease.store.touch(self._part, keys, used_ns=self._used_ns, each=each)
        finally:
            self.abandon()


def nothing_there(command: Probe) -> dict[str, Any]:
    """The answer to a probe that finds nothing."""
    if command.each:
        return {"present": [bytes(len(q) // PAGE_KEY_BYTES) for q in command.queries]}
    return {"hits": [0] * len(command.queries)}
