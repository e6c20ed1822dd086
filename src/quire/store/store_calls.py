"""StoreCalls: may a store be asked now, and what does what came of it say about the store?

Knows deadlines, calls that have not come back, and the breaker; of pages their statuses only.
Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.store.breaker import Breaker, BreakerState
from quire.store.counters import StoreCounters
from quire.types import PageStatus

STALL_GRACE_S = 1.0
"""A call this long past its deadline means that the store is stuck, not merely late."""

_FAULTS = (PageStatus.FAILED, PageStatus.TIMEOUT)


class StoreCalls:
    def __init__(
        self, clock: Callable[[], float], breaker: Breaker, counters: StoreCounters
    ) -> None:
        self._clock = clock
        self._breaker = breaker
        self._counters = counters
        self._changed = threading.Condition()
        self._deadlines: dict[object, float] = {}
        self.is_closed = False

    @property
    def store_answers(self) -> bool:
        """Else it is not asked for a while."""
        with self._changed:
            is_stalled = self._is_stalled()
        return not is_stalled and self._breaker.state is BreakerState.CLOSED

    @property
    def times_opened(self) -> int:
        return self._breaker.times_opened

    def is_late(self, deadline: float) -> bool:
        """Who has waited so long for its turn asks nothing, which is no fault of the store."""
        is_late = self._clock() >= deadline
        if is_late:
            self._counters.count("declined:late")
        return is_late

    def may_ask(self) -> bool:
        """If so, judge() follows."""
        with self._changed:
            reason = "closed" if self.is_closed else "stalled" if self._is_stalled() else ""
        if not reason and not self._breaker.enter():
            reason = "breaker_open"
        if reason:
            self._counters.count(f"declined:{reason}")
        return not reason

    @contextmanager
    def call(self, deadline: float) -> Iterator[None]:
        call = object()
        with self._changed:
            self._deadlines[call] = deadline
        try:
            yield
        finally:
            with self._changed:
                del self._deadlines[call]
                self._changed.notify_all()

    def judge(self, answered: Sequence[PageStatus], began_s: float, deadline: float) -> None:
        """Tell the breaker. A call failed when most of its pages got no answer: a slow store that
        still delivers is of use. Pages never asked for say nothing about the store, and those asked
        for when there was hardly any time left say little."""
        num_faults = sum(status in _FAULTS for status in answered)
        if not answered:
            self._breaker.leave()
        elif 2 * num_faults <= len(answered):
            self._breaker.success()
        elif PageStatus.FAILED in answered:
            self._breaker.failure()
        else:
            # Who says early that no answer came had as long as who waited for it.
            self._breaker.silence(max(self._clock(), deadline) - began_s)

    def _is_stalled(self) -> bool:
        """A call does not come back."""
        overdue = self._clock() - STALL_GRACE_S
        return any(deadline < overdue for deadline in self._deadlines.values())

    def close(self, timeout_s: float) -> bool:
        """Decline new calls, and give running ones so long. False: it was closed before."""
        with self._changed:
            if self.is_closed:
                return False
            self.is_closed = True
            self._changed.wait_for(lambda: not self._deadlines, timeout_s)
        return True
