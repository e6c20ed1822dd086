"""Lane: a bounded queue of tasks and the few threads that work on it.

The one place where the number of transfers under way is decided: a lane's threads, times what the
store moves at a time for one of them. Knows nothing of pages or stores. Threads take a bounded
piece of the task at the front, which then goes to the back, so that a long operation does not hold
back the short ones behind it; of a wide task several threads may have a piece at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Task(Protocol):
    """Something a lane carries out."""

    wide: bool
    """May several threads work on it at once?"""

    def take(self) -> Callable[[], None] | None:
        """A piece to work on. None: there is nothing left to take."""

    @property
    def has_more(self) -> bool:
        """Is it of use to ask again?"""

    def fail(self, error: Exception) -> None:
        """A piece raised: end, and report it."""

    def cancel(self) -> None:
        """No further piece will be taken: end, and report it."""


class Once:
    """A task of one piece: `act`, unless it is cancelled before."""

    wide = False
    has_more = False

    def __init__(
        self,
        act: Callable[[], None],
        *,
        fail: Callable[[Exception], None],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        self._act = act
        self._fail = fail
        self._cancel = cancel
        self._is_taken = False

    def take(self) -> Callable[[], None] | None:
        if self._is_taken:
            return None
        self._is_taken = True
        return self._act

    def fail(self, error: Exception) -> None:
        self._fail(error)

    def cancel(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            self._cancel()


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
        """Stop, after what is queued (drain) or cancelling it. False if a thread hangs on."""
        with self._changed:
            self._closing = True
            cancelled = [] if drain else list(self._queue)
            if not drain:
                self._queue.clear()
            self._changed.notify_all()
        for task in cancelled:
            task.cancel()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            piece = task.take()
            if piece is None:
                continue
            if task.wide and task.has_more:
                self._requeue(task)
            try:
                piece()
            except Exception as error:  # thread boundary: this one task fails
                task.fail(error)
            if not task.wide and task.has_more:
                self._requeue(task)

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _requeue(self, task: Task) -> None:
        if not self.submit(task, force=True):
            task.cancel()
