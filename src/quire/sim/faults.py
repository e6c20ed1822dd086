"""What goes wrong, and when: the simulated workers ask before every backend call.

A backend call is what a worker does in one piece: one copy, one batch of pages to or from the
store, one probe, one change of the store. Knows kinds of calls; does not know what they move.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from quire.manager.operations import OperationKind
from quire.types import PageStatus


class Fault(enum.Enum):
    FAIL = "fail"
    """Nothing is moved."""
    SHORT = "short"
    """Only the first half is moved."""
    TIMEOUT = "timeout"
    CORRUPT = "corrupt"
    """Read back, and found to be wrong."""
    MISSING = "missing"
    REJECT = "reject"
    LOST = "lost"
    """A write that is reported as done, and is not there later."""
    MALFORMED = "malformed"
    """An answer that does not fit the question."""


FAULTS_OF: dict[OperationKind, Sequence[Fault]] = {
    OperationKind.BACKUP: (Fault.FAIL, Fault.SHORT),
    OperationKind.LOAD: (Fault.FAIL, Fault.SHORT),
    OperationKind.WRITE: (Fault.FAIL, Fault.SHORT, Fault.TIMEOUT, Fault.REJECT, Fault.LOST),
    OperationKind.FETCH: (Fault.FAIL, Fault.SHORT, Fault.TIMEOUT, Fault.CORRUPT, Fault.MISSING),
    OperationKind.PROBE: (Fault.FAIL, Fault.SHORT, Fault.MALFORMED),
    OperationKind.STORE: (Fault.FAIL,),
    OperationKind.SERVE: (Fault.FAIL,),
}

_STATUS = {
    Fault.FAIL: PageStatus.FAILED,
    Fault.SHORT: PageStatus.FAILED,
    Fault.TIMEOUT: PageStatus.TIMEOUT,
    Fault.CORRUPT: PageStatus.CORRUPT,
    Fault.MISSING: PageStatus.MISS,
    Fault.REJECT: PageStatus.REJECTED,
}


def statuses(fault: Fault | None, count: int) -> list[PageStatus]:
    """Outcome of a call of `count` pages, before the store has its say."""
    if fault is None or fault is Fault.LOST:
        return [PageStatus.OK] * count
    good = count // 2 if fault is Fault.SHORT else 0
    return [PageStatus.OK] * good + [_STATUS[fault]] * (count - good)


class Faults(Protocol):
    def on_call(self, kind: OperationKind, rank: int) -> Fault | None:
        """A backend call begins; what shall go wrong with it?"""


class RandomFaults:
    """Each call fails with probability `rate` times its rank's weight."""

    def __init__(
        self,
        rng: Random,
        rate: float,
        rank_weights: Sequence[float],
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell` is called at each fault."""
        self._rng = rng
        self._tell = tell
        self._rates = [rate * weight for weight in rank_weights]
        self.injected: Counter[str] = Counter()
        self.active = True

    def on_call(self, kind: OperationKind, rank: int) -> Fault | None:
        if not self.active or self._rng.random() >= self._rates[rank]:
            return None
        fault = self._rng.choice(FAULTS_OF[kind])
        self.injected[f"{kind}:{fault.value}"] += 1
        self._tell()
        return fault
