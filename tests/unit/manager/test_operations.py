"""What is kept of operations does not grow with those that have ended."""

from __future__ import annotations

from quire.manager.operations import SPARE_DEADLINES, OperationKind, Operations
from quire.messages import Transferred


def test_deadlines_of_what_has_ended_do_not_pile_up_behind_one_that_runs() -> None:
    now = 0.0
    operations = Operations(1, ["full"], lambda: now)

    def start(timeout_s: float) -> int:
        op = operations.start(
            OperationKind.SERVE, {"full": 1}, timeout_s=timeout_s, on_report=lambda op: None
        )
        return op.id

    first = start(1.0)
    for _ in range(5 * SPARE_DEADLINES):
        op = operations.running[start(3600.0)]  # type: ignore[index]
        operations.transferred(Transferred(op.id, 0, "full", 0, b"\0", True))
    last = start(2.0)
    assert len(operations.deadlines) <= 2 * SPARE_DEADLINES
    assert operations.next_deadline() == 1.0
    now = 1.5
    assert operations.expire(now) == 1
    assert list(operations.running) == [first, last]
    assert operations.next_deadline() == 2.0
