"""Circuit breaker: stops asking a store that does not answer, and tries again later.

    CLOSED ──N consecutive failures──▶ OPEN ──cool-down over──▶ HALF_OPEN (one trial at a time)
      ▲                                 ▲                          │
      └──────────── success ────────────┼──────────────────────────┤
                                        └───────── failure ────────┘

A store that says nothing is told from one that was asked too late by how long it was given: times
in which no answer came add up, and are a failure when there is enough of them.

Knows nothing of stores: it is told of successes, failures and silence. Thread-safe.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

PATIENCE_S = 0.5
"""Who is given less, and does not answer, may be quick enough for all we know."""


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Every `enter()` that returned True is followed by exactly one success, failure, silence or
    leave."""

    def __init__(
        self, clock: Callable[[], float], *, max_failures: int = 5, cooldown_s: float = 5.0
    ) -> None:
        self._clock = clock
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._silent_s = 0.0
        """How long it was given in vain, since it answered or that was a failure."""
        self._opened_at = 0.0
        self._trial_running = False
        self.times_opened = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            return self._current()

    def enter(self) -> bool:
        """May a call be made now?"""
        with self._lock:
            self._state = self._current()
            if self._state is BreakerState.CLOSED:
                return True
            if self._state is BreakerState.HALF_OPEN and not self._trial_running:
                self._trial_running = True
                return True
            return False

    def success(self) -> None:
        with self._lock:
            self._state = BreakerState.CLOSED
            self._failures = 0
            self._silent_s = 0.0
            self._trial_running = False

    def silence(self, given_s: float) -> None:
        """No answer came, and there was so much time for one."""
        with self._lock:
            self._silent_s += given_s
            is_failure = self._silent_s >= PATIENCE_S
            if is_failure:
                self._silent_s = 0.0
        if is_failure:
            self.failure()
        else:
            self.leave()

    def failure(self) -> None:
        with self._lock:
            self._failures += 1
            trial_failed = self._state is BreakerState.HALF_OPEN
            self._trial_running = False
            if trial_failed or (
                self._state is BreakerState.CLOSED and self._failures >= self._max_failures
            ):
                self._state = BreakerState.OPEN
                self._opened_at = self._clock()
                self.times_opened += 1

    def leave(self) -> None:
        """The call ended without saying anything about the store (cancelled, nothing asked)."""
        with self._lock:
            self._trial_running = False

    def _current(self) -> BreakerState:
        cooled = self._clock() - self._opened_at >= self._cooldown_s
        if self._state is BreakerState.OPEN and cooled:
            return BreakerState.HALF_OPEN
        return self._state
