"""Lane: a bounded queue of tasks and the few threads that work on it.

Knows nothing of pages or stores. A task does one bounded piece at a time and goes to the back of
the queue when more is left, so that a long operation does not hold back the short ones behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class Task(Protocol):
    """Something a lane carries out. At any time at most one thread is in step()."""

    def step(self) -> bool:
        """Do one piece. True: put me back in the queue."""

    def fail(self, error: Exception) -> None:
        """step() raised: end, and report it."""

    def abandon(self) -> None:
        """The lane is closing and will not call step() again: end, and report it."""


class Lane:
    def __init__(self, name: str, num_threads: int, max_queued: int) -> None:
        self._queue: deque[Task] = deque()
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._closing = False
        # Daemons: a store that hangs for ever must not keep the process from exiting.
        self._threads = [
            threading.Thread(target=self._run, name=f"quire-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, *, force: bool = False) -> bool:
        """False, and nothing done, when the queue is full (unless forced) or closing."""
        with self._changed:
            if self._closing or (len(self._queue) >= self._max_queued and not force):
                return False
            self._queue.append(task)
            self._changed.notify()
        return True

    def close(self, timeout_s: float, *, drain: bool = False) -> bool:
        """Stop, after what is queued (drain) or abandoning it. False if a thread hangs on."""
        with self._changed:
            self._closing = True
            abandoned = [] if drain else list(self._queue)
            if not drain:
                self._queue.clear()
            self._changed.notify_all()
        for task in abandoned:
            task.abandon()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                more = task.step()
            except Exception as error:  # thread boundary: this one task fails
                task.fail(error)
                more = False
            if more and not self._requeue(task):
                task.abandon()

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _requeue(self, task: Task) -> bool:
        with self._changed:
            if self._closing:
                return False
            self._queue.append(task)
            self._changed.notify()
        return True
