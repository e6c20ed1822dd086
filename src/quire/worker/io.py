"""The I/O operations of a worker: write and fetch page by page, probe a batch of prefixes.

Knows one operation at a time: its pages, its deadline, its store. Does not know queues (lanes.py)
or which operations exist (worker.py).

    QUEUED ──a thread takes it──▶ RUNNING ──batch done, more left──▶ QUEUED
       │                             └──last batch, first miss, error, cancelled──▶ FINISHED
       └──cancelled, past its deadline, lane closed──▶ FINISHED

Entering FINISHED gives back what was borrowed (the store) and sends the one final report. While
RUNNING the store or peer may be writing into the pages, so a cancellation waits for the batch to
end: only the final report says that the pages may be reused.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.memory.host import HostPool
from quire.messages import Completion, Fetch, Probe, Probed, Transferred, Write
from quire.store.base import Part
from quire.types import PAGE_KEY_BYTES, PageKey, PageStatus, page_array, split_keys
from quire.worker.attachment import StoreLease

Clock = Callable[[], float]
"""Monotonic seconds."""


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
        self._cancelled = False
        self._lock = threading.Lock()

    @property
    def state(self) -> TaskState:
        return self._state

    def step(self) -> bool:
        with self._lock:
            if self._state is TaskState.FINISHED:  # cancelled or expired while queued
                return False
            self._state = TaskState.RUNNING
        if self._clock() >= self._deadline:
            self._finish(PageStatus.TIMEOUT)
        elif self._piece():
            self._finish(None)
        return self._pause()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._state is not TaskState.QUEUED:
                return
            self._state = TaskState.FINISHED
        self._end(PageStatus.CANCELLED)

    def expire(self, now: float) -> None:
        """End it if its deadline passed while no thread was free to take it."""
        with self._lock:
            if self._state is not TaskState.QUEUED or now < self._deadline:
                return
            self._state = TaskState.FINISHED
        self._end(PageStatus.TIMEOUT)

    def fail(self, error: Exception) -> None:
        self._reporter.count_error(error)
        self._finish(PageStatus.FAILED)

    def reject(self) -> None:
        """No room in the queue: it was never taken on."""
        self._finish(PageStatus.REJECTED)

    def abandon(self) -> None:
        self._finish(PageStatus.CANCELLED)

    def _pause(self) -> bool:
        """RUNNING → QUEUED; False when there is nothing left to do."""
        with self._lock:
            if self._state is TaskState.FINISHED:
                return False
            if not self._cancelled:
                self._state = TaskState.QUEUED
                return True
        self._finish(PageStatus.CANCELLED)
        return False

    def _finish(self, rest: PageStatus | None) -> None:
        with self._lock:
            if self._state is TaskState.FINISHED:
                return
            self._state = TaskState.FINISHED
        self._end(rest)

    def _end(self, rest: PageStatus | None) -> None:
        # What is held goes first: whoever sees the final report may count on it being free.
        if self._let_go is not None:
            self._let_go()
        self._final_report(rest)

    @abstractmethod
    def _piece(self) -> bool:
        """Do one bounded piece of the work; True when it was the last."""

    @abstractmethod
    def _final_report(self, rest: PageStatus | None) -> None:
        """Send the final report; pages not done yet have status `rest` (None: all are done)."""


class PageTask(IoTask):
    """A write or a fetch, in batches and in order."""

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
        self._timeout_s = deadline - clock()
        self._batch_pages = batch_pages
        self._pages = page_array(command.host)
        # Pages [0, first) have been reported; those of `statuses` follow, unreported.
        self._first = 0
        self._statuses = b""
        self._seconds = 0.0

    def _piece(self) -> bool:
        first = self._first
        end = min(first + self._batch_pages, len(self._pages))
        started = self._clock()
        statuses = self._move(first, end)
        self._seconds = self._clock() - started
        if len(statuses) != end - first:
            raise ValueError(f"{len(statuses)} of {end - first} pages answered")
        self._statuses = bytes(statuses)
        if end == len(self._pages):
            return True
        stop = self._stops_at(statuses)
        if stop is None:
            self._report_progress()
            return False
        self._statuses += bytes([stop]) * (len(self._pages) - end)
        return True

    @abstractmethod
    def _move(self, first: int, end: int) -> list[PageStatus]:
        """Move pages [first, end) of the command; a status for each."""

    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        """Not None: the pages behind these are not tried, and this is their status."""
        del statuses
        return None

    def _report_progress(self) -> None:
        now = self._clock()
        if PageStatus.OK in self._statuses and now < self._deadline:  # what moves is not late
            self._deadline = now + self._timeout_s
        self._send(final=False)
        self._first += len(self._statuses)
        self._statuses = b""

    def _final_report(self, rest: PageStatus | None) -> None:
        if rest is not None:
            missing = len(self._pages) - self._first - len(self._statuses)
            self._statuses += bytes([rest]) * missing
        self._send(final=True)

    def _send(self, *, final: bool) -> None:
        self._reporter.report(
            Transferred(
                op=self._command.op,
                rank=self._reporter.rank,
                component=self._command.component,
                first=self._first,
                statuses=self._statuses,
                final=final,
                seconds=self._seconds,
            )
        )
        self._seconds = 0.0


class StoreTask(PageTask):
    """A write to the store, or a fetch from it."""

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
        reporter: Reporter,
    ) -> None:
        """The command's pages and keys have been checked."""
        super().__init__(
            command,
            batch_pages=batch_pages,
            deadline=deadline,
            clock=clock,
            reporter=reporter,
            let_go=lease.release,
        )
        self._part = part
        self._host = host
        self._lease = lease
        self._keys = split_keys(command.keys)

    def _move(self, first: int, end: int) -> list[PageStatus]:
        keys = self._keys[first:end]
        views = [self._host.page_view(page) for page in self._pages[first:end].tolist()]
        store = self._lease.store
        move = store.put if isinstance(self._command, Write) else store.get
        return move(
            self._part, keys, views, deadline=self._deadline, cancelled=lambda: self._cancelled
        )

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
        self._answer = nothing_there(command)

    def _piece(self) -> bool:
        queries = [split_keys(query) for query in self._command.queries]
        if self._command.each:
            self._look_for_each(queries)
        else:
            self._look_for_prefix(queries)
        return True

    def _look_for_prefix(self, queries: list[list[PageKey]]) -> None:
        hits = self._lease.store.contains_prefix(self._part, queries, deadline=self._deadline)
        if len(hits) != len(queries):
            raise ValueError(f"store answered {len(hits)} of {len(queries)} queries")
        self._answer["hits"] = [
            max(0, min(hit, len(query))) for hit, query in zip(hits, queries, strict=True)
        ]

    def _look_for_each(self, queries: list[list[PageKey]]) -> None:
        present = self._lease.store.contains_each(self._part, queries, deadline=self._deadline)
        if list(map(len, present)) != list(map(len, queries)):
            raise ValueError(f"store answered {len(present)} of {len(queries)} queries")
        self._answer["present"] = present

    def _final_report(self, rest: PageStatus | None) -> None:
        # No answer in time, or none wanted any more: nothing is promised.
        del rest
        command = self._command
        self._reporter.report(
            Probed(command.op, self._reporter.rank, command.component, **self._answer)
        )


def nothing_there(command: Probe) -> dict[str, Any]:
    """The answer to a probe that finds nothing."""
    if command.each:
        return {"present": [bytes(len(q) // PAGE_KEY_BYTES) for q in command.queries]}
    return {"hits": [0] * len(command.queries)}
