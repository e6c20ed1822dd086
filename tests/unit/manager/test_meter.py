"""The rate of a line is that of the line, whoever shares it."""

from __future__ import annotations

import pytest

from quire.manager.fetches.meter import Meter
from quire.manager.operations import Operation, OperationKind, Operations
from quire.messages import Transferred


class Line:
    def __init__(self) -> None:
        self.now = 0.0
        self.rates: list[float] = []
        """Pages a second."""
        self._operations = Operations(1, ["full"], lambda: self.now)
        self._meter = Meter(lambda: self.now, lambda n, s: self.rates.append(n / s))

    def begin(self, pages: int) -> Operation:
        op = self._operations.start(
            OperationKind.FETCH, {"full": pages}, timeout_s=9.0, on_report=lambda op: None
        )
        self._meter.begin(op)
        return op

    def come(
        self, op: Operation, first: int, last: int, *, status: int = 0, at_s: float | None = None
    ) -> None:
        final = last == op.num_pages
        said = bytes([status]) * (last - first)
        report = Transferred(op.id, 0, "full", first, said, final, at_s=at_s)
        self._operations.transferred(report)
        if final:
            self._meter.end(op)

    def forget(self, op: Operation) -> None:
        self._meter.forget(op)


def test_one_after_the_other() -> None:
    line = Line()
    ops = [line.begin(10) for _ in range(3)]
    for op in ops:
        line.now += 1.0
        line.come(op, 0, 10)
    assert line.rates == pytest.approx([10.0] * 3)


def test_taking_turns() -> None:
    """They end together, each after as long as all of them take."""
    line = Line()
    ops = [line.begin(10) for _ in range(4)]
    for page in range(10):
        line.now += 0.4
        for op in ops:
            line.come(op, page, page + 1)
    assert line.rates[0] == pytest.approx(10.0, rel=0.1)


def test_idle_time_does_not_count_nor_do_pages_that_did_not_come() -> None:
    line = Line()
    for _ in range(2):
        op = line.begin(20)
        line.now += 1.0
        line.come(op, 0, 10)
        line.come(op, 10, 20, status=3)
        line.now += 50.0
    assert line.rates == pytest.approx([10.0] * 2)


def test_one_that_is_stuck_does_not_spoil_the_rate_for_ever() -> None:
    line = Line()
    stuck = line.begin(5)
    line.now += 60.0
    line.forget(stuck)
    op = line.begin(10)
    line.now += 1.0
    line.come(op, 0, 10)
    assert line.rates == pytest.approx([10.0])
    line.come(stuck, 0, 5)


def test_reports_that_are_read_together_after_a_long_step_count_by_when_they_were_made() -> None:
    """Read all at once, each seemed to have brought its pages in no time at all."""
    line = Line()
    ops = [line.begin(10) for _ in range(9)]
    line.now = 60.0
    for number, op in enumerate(ops, 1):
        line.come(op, 0, 10, at_s=number * 1.0)
        line.now += 1e-6
    assert line.rates == pytest.approx([10.0] * 9)


def test_the_last_pages_of_operations_that_take_turns_are_no_rate_of_their_own() -> None:
    line = Line()
    ops = [line.begin(2) for _ in range(8)]
    for op in ops:
        line.now += 0.01
        line.come(op, 0, 1)
    for op in ops:
        line.now += 0.0001
        line.come(op, 1, 2)
    assert len(line.rates) == 2
    assert line.rates[0] == pytest.approx(9 / 0.0801, rel=0.01)
