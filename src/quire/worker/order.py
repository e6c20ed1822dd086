"""WriteOrder: a write begins when the writes of the pages that it needs have ended.

The store does not take a page before the page that it needs. Writes of one conversation follow each
other closely, so the second would often come too early. Knows keys and who waits for whom; starting
a task is its owner's business. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from quire.types import PageKey
from quire.worker.io import StoreTask


class WriteOrder:
    def __init__(self, start: Callable[[StoreTask], None]) -> None:
        """`start(task)` when its turn has come; from any thread, never waiting."""
        self._start = start
        self._lock = threading.Lock()
        self._writer: dict[PageKey, int] = {}
        """The last write, not ended yet, of each page."""
        self._followers: dict[int, list[int]] = {}
        """By write: those that need pages of it. Has every write that has not ended."""
        self._waiting: dict[int, tuple[StoreTask, set[int]]] = {}
        """Those, and what they wait for."""
        self._ready: deque[StoreTask] = deque()
        self._is_starting = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, number: int, task: StoreTask, keys: Sequence[PageKey], parents: Sequence[PageKey]
    ) -> None:
        """Start `task`, now or later. `number` is its own until ended(number, keys)."""
        with self._lock:
            needed = {self._writer[key] for key in parents if key in self._writer}
            for other in needed:
                self._followers[other].append(number)
            self._followers[number] = []
            self._writer.update(dict.fromkeys(keys, number))
            if needed:
                self._waiting[number] = (task, needed)
                return
        self._start(task)

    def ended(self, number: int, keys: Sequence[PageKey]) -> None:
        """Once per write, however it ended."""
        with self._lock:
            for key in keys:
                if self._writer.get(key) == number:
                    del self._writer[key]
            self._waiting.pop(number, None)
            for follower in self._followers.pop(number, []):
                if follower not in self._waiting:
                    continue
                task, needed = self._waiting[follower]
                needed.discard(number)
                if not needed:
                    del self._waiting[follower]
                    self._ready.append(task)
            if self._is_starting:  # a task that cannot start ends here, inside the loop below
                return
            self._is_starting = True
        while (task_or_none := self._next_ready()) is not None:
            self._start(task_or_none)

    def _next_ready(self) -> StoreTask | None:
        with self._lock:
            self._is_starting = bool(self._ready)
            return self._ready.popleft() if self._ready else None
