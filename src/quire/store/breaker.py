"""Circuit breaker: stops asking a store that does not answer, and tries again later.

    CLOSED ──N consecutive failures──▶ OPEN ──cool-down over──▶ HALF_OPEN (one trial at a time)
      ▲                                 ▲                          │
      └──────────── success ────────────┼──────────────────────────┤
                                        └───────── failure ────────┘

Knows nothing of stores: it is told of successes and failures. Thread-safe.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Every `enter()` that returned True is followed by exactly one success, failure or leave."""

    def __init__(
        self, clock: Callable[[], float], *, max_failures: int = 5, cooldown_s: float = 5.0
    ) -> None:
        self._clock = clock
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0
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
            self._trial_running = False

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
