"""Meter: how fast pages come over one line, however many operations share it.

Knows operations and time. It counts the pages that all operations have brought while the line was
busy: whether they take turns or go one after the other makes no difference then. What counts is
when their reports were made, not when they are read: that is once in a step, and a step may be
long.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.manager.operations import Operation
from quire.types import OperationId, PageStatus

_OK = bytes([PageStatus.OK])
_LEAST_S = 0.05
"""Of a busy line, for a rate: operations that take turns end together, one page after the other."""


class Meter:
    def __init__(self, clock: Callable[[], float], observe: Callable[[int, float], None]) -> None:
        """`observe`: told of pages, and the seconds in which they came."""
        self._clock = clock
        self._observe = observe
        self._under_way: dict[OperationId, Operation] = {}
        self._counted: dict[OperationId, int] = {}
        self._brought = 0
        """Pages, since then."""
        self._since_s = 0.0

    def begin(self, op: Operation) -> None:
        if not self._under_way:
            self._since_s, self._brought = self._clock(), 0
        self._under_way[op.id] = op
        self._counted[op.id] = 0

    def end(self, op: Operation) -> None:
        for other in self._under_way.values():
            count = _num_here(other)
            self._brought += count - self._counted[other.id]
            self._counted[other.id] = count
        self.forget(op)
        seconds = op.reported_s - self._since_s
        if self._brought and seconds > 0 and (seconds >= _LEAST_S or not self._under_way):
            self._observe(self._brought, seconds)
            self._since_s, self._brought = op.reported_s, 0

    def forget(self, op: Operation) -> None:
        """It is overdue: whatever it still brings says nothing of the line."""
        self._under_way.pop(op.id, None)
        self._counted.pop(op.id, None)


def _num_here(op: Operation) -> int:
    """Of its first component, on every rank."""
    first = next(name for _, name in op.legs)
    return min(leg.count(_OK) for (_, name), leg in op.legs.items() if name == first)
