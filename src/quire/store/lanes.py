"""Parallel work on one batch: chunks handed out to the caller and to a few shared threads.

The calling thread works on its own batch too. So a batch always makes progress, even when every
shared thread is busy with, or stuck in, somebody else's; the threads only add speed.
Knows nothing of stores or pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

S = TypeVar("S")


class Lanes:
    """Daemon threads, started as work comes: a thread stuck in a dead file system must not keep
    the process from ending, as an executor's would."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads = num_threads
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, on some lane. Dropped after close()."""
        with self._lock:
            if self._closed:
                return
            if len(self._threads) < self.num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Let the queued jobs finish and end the threads; gives up on stuck ones."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class Batch(Generic[S]):
    """`num_items` items in chunks of `chunk`; each chunk is worked on exactly once or not at all.

    [0, taken) were handed out, [taken, num_items) never were, because `stop` gave a reason.
    """

    def __init__(
        self,
        num_items: int,
        chunk: int,
        work: Callable[[int, int], None],
        stop: Callable[[], S | None],
    ) -> None:
        """`work(first, end)` must not raise. `stop()` is asked before each chunk."""
        self._num_items = num_items
        self._chunk = chunk
        self._work = work
        self._stop = stop
        self._idle = threading.Condition()
        self._running = 0
        self.taken = 0
        self.stopped: S | None = None

    def run(self, lanes: Lanes) -> None:
        """Work until every chunk is done or refused. On return nobody works on it any more."""
        num_chunks = -(-self._num_items // self._chunk)
        for _ in range(min(lanes.num_threads, num_chunks - 1)):
            lanes.submit(self._help)
        self._help()
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0)

    def _help(self) -> None:
        while (first := self._take()) is not None:
            try:
                self._work(first, min(first + self._chunk, self._num_items))
            finally:
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()

    def _take(self) -> int | None:
        with self._idle:
            if self.taken >= self._num_items or self.stopped is not None:
                return None
            self.stopped = self._stop()
            if self.stopped is not None:
                return None
            first = self.taken
            self.taken = min(first + self._chunk, self._num_items)
            self._running += 1
            return first
