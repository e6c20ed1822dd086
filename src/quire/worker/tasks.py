"""An I/O operation of a worker, in pieces that threads take: its states, deadline and reports.

Does not know what moves the bytes (store_tasks.py, peering.py: of a peer), nor queues (lanes.py).

    waiting ──a thread takes a piece──▶ running ──last thread out, more left──▶ waiting
       │                                  └──last thread out, nothing left or stopped──▶ over
       └──cancelled, past its deadline, lane closed──▶ over

Stopped: at a fetch's first miss, by an error, when cancelled or past the deadline. When it is over,
what was borrowed (the store) is given back and the one final report is sent. While threads are
inside, the store or peer may be writing into the pages, so stopping waits for the pieces under way:
only the final report says that the pages may be reused.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from quire.messages import Backup, Completion, Fetch, Load, Serve, Transferred, Write
from quire.types import Clock, PageStatus, num_pages, page_array

PagesCommand = Backup | Load | Write | Fetch | Serve

UNKNOWN = 255
"""In place of a status: not moved yet."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Where the news of a worker's operations go, and the clock they go by."""

    rank: int
    clock: Clock
    report: Callable[[Completion], None]
    count_error: Callable[[Exception], None]
    """An exception ended an operation."""

    def finish(self, command: PagesCommand, status: PageStatus, seconds: float = 0.0) -> None:
        """The one report of a command whose pages all have this status."""
        op, component, statuses = command.op, command.component, bytes([status])
        statuses *= num_pages(command.host)
        self.report(
            Transferred(
                op,
                self.rank,
                component,
                0,
                statuses,
                final=True,
                seconds=seconds,
                at_s=self.clock(),
            )
        )


class IoTask(ABC):
    """State machine above; subclasses say what a piece is and what the final report is."""

    wide = False
    holds_pages = True
    """False: nobody minds if a thread is still inside when it is over."""

    def __init__(
        self, reporter: Reporter, timeout_s: float, let_go: Callable[[], None] = lambda: None
    ) -> None:
        """`let_go` gives back what was borrowed for the operation."""
        self._let_go = let_go
        self._reporter = reporter
        self._clock = reporter.clock
        # NaN compares false with everything and would never expire.
        self._timeout_s = 0.0 if math.isnan(timeout_s) else timeout_s
        self._deadline = self._clock() + self._timeout_s
        self._is_over = False
        self._num_running = 0
        self._stop: PageStatus | None = None
        """Why no further piece is taken, and the status of what is left."""
        self._lock = threading.Lock()

    def take(self) -> Callable[[], None] | None:
        with self._lock:
            if self._is_over or self._stop is not None:
                return None
            work = None if self._is_late(self._clock()) else self._next_piece()
            if work is not None:
                self._num_running += 1
                return lambda: self._run(work)
        self.expire(self._clock())
        return None

    @property
    def has_more(self) -> bool:
        return self._stop is None and not self._is_complete()

    def cancel(self) -> None:
        self.stop(PageStatus.CANCELLED)

    def expire(self, now: float) -> None:
        """End it if its deadline has passed, whether or not a thread was free to take it."""
        if self._is_late(now):
            self.stop(PageStatus.TIMEOUT)

    def fail(self, error: Exception) -> None:
        """A piece raised."""
        self._reporter.count_error(error)
        with self._lock:
            self._stop = self._stop or PageStatus.FAILED
        self._leave()

    def _is_late(self, now: float) -> bool:
        return now >= self._deadline

    def _run(self, work: Callable[[], None]) -> None:
        work()
        self._leave()

    def stop(self, rest: PageStatus) -> None:
        """Take no further piece, and end it unless pages are in use."""
        with self._lock:
            if self._is_over:
                return
            self._stop = self._stop or rest
            if self._num_running and self.holds_pages:
                return
            self._is_over = True
            idle = self._num_running == 0
        # What is held goes first: whoever sees the final report may count on it being free.
        if idle:
            self._let_go()
        self._final_report()

    def _leave(self) -> None:
        """A thread is done with its piece. The last one out ends the operation, or leaves it to
        the lane."""
        with self._lock:
            self._num_running -= 1
            if self._num_running or self.has_more:
                return
            was_reported, self._is_over = self._is_over, True
        if not was_reported:
            self._used()
        self._let_go()
        if not was_reported:
            self._final_report()

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
        reporter: Reporter,
        *,
        batch_pages: int,
        let_go: Callable[[], None] = lambda: None,
        ahead: PageTask | None = None,
    ) -> None:
        """The command's pages have been checked. `ahead`: its turns are that one's first."""
        super().__init__(reporter, command.timeout_s, let_go)
        self._ahead = ahead
        self._command = command
        self._batch_pages = batch_pages
        self._pages = page_array(command.host)
        # Pages [0, first) have been reported, [0, taken) were given to threads.
        self._statuses = bytearray([UNKNOWN]) * len(self._pages)
        self._first = 0
        self._taken = 0
        self._reported_at: float | None = None
        self._found_keys = b""
        """Keys of its pages, if it had to compute them."""

    def take(self) -> Callable[[], None] | None:
        ahead = self._ahead
        if ahead is not None:
            piece = ahead.take()
            if piece is not None:
                return partial(_carry_out, ahead, piece)
            self._ahead = None  # all of it was taken
        return super().take()

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
            now = self._clock()
            if PageStatus.OK in statuses and now < self._deadline:  # what moves is not late
                self._deadline = now + self._timeout_s
            self._statuses[first:end] = bytes(statuses)
            self._stop = self._stop or self._stops_at(statuses)
            unknown = self._statuses.find(UNKNOWN, self._first)
            known = len(self._pages) if unknown < 0 else unknown
            if known > self._first and known < len(self._pages) and self._stop is None:
                self._send(known, final=False)

    @abstractmethod
    def _move(self, first: int, end: int) -> list[PageStatus]:
        """Move pages [first, end) of the command; a status for each."""

    @abstractmethod
    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        """Not None: the pages behind these are not tried, and this is their status."""

    def _final_report(self) -> None:
        rest = self._stop if self._stop is not None else PageStatus.FAILED
        self._statuses = self._statuses.replace(bytes([UNKNOWN]), bytes([rest]))
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
                keys=self._found_keys if final else b"",
                at_s=now,
            )
        )
        self._first = end
        self._reported_at = now


def _carry_out(task: IoTask, piece: Callable[[], None]) -> None:
    """On another task's turn."""
    try:
        piece()
    except Exception as error:  # thread boundary: the task whose piece it is fails
        task.fail(error)
