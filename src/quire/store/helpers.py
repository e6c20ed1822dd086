"""Helpers: a few threads for calls that are made side by side. Knows no store.

Daemons: a store that hangs for ever must not keep the process from exiting. Nor do calls to it pile
up: those that nobody waits for any more are kept until a thread comes to them, so many at most.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from quire.errors import StoreError

MAX_OPEN = 256
"""Calls that have not ended."""

Answer = TypeVar("Answer")


class Helpers:
    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._num_open = 0
        """Calls that have not ended."""

    @property
    def num_open(self) -> int:
        return self._num_open

    def start(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Can be cancelled until a thread has taken it. After close() it has failed, and when there
        are too many, or no thread can be had."""
        future: Future[Answer] = Future()

        def job() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(work())
            except BaseException as error:  # thread boundary: told to whoever waits
                future.set_exception(error)
            finally:
                with self._lock:
                    self._num_open -= 1

        with self._lock:
            if self._is_closed:
                future.set_exception(StoreError("the stores are closed: open them again"))
                return future
            if self._num_open >= MAX_OPEN:
                future.set_exception(StoreError("the store is behind with what it was asked"))
                return future
            if len(self._threads) <= self._num_open and len(self._threads) < self._num_threads:
                try:
                    self._threads.append(self._thread())
                except RuntimeError as error:  # the machine has no more
                    if not self._threads:
                        future.set_exception(StoreError(f"the store is not asked: {error}"))
                        return future
            self._num_open += 1
            self._jobs.put(job)  # before the Nones of close()
        return future

    def close(self) -> None:
        """What was started is still done; nobody waits for it here."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
