"""Operations in flight: what was asked of the workers, and what each of them has reported.

An operation has one *leg* per (rank, component). Pages count as done only when every leg says so:
the agreed length is the minimum over the legs. An operation ends when every leg has sent its
final report, or its rank is lost; only then may its pages be reused, whatever its deadline says.
What moves is not late: every report that brings a page gives a fetch or a write its whole time
again. A copy is reported once by each leg, which says nothing of the other legs.

    RUNNING ──deadline──▶ OVERDUE ──┐
       └──────last final report─────┴▶ ENDED
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from quire.components import Guard
from quire.messages import Probed, Transferred
from quire.types import OperationId, PageStatus

COPY_TIMEOUT_S = 60.0
"""In which a copy between device and host ends, or is overdue."""
SPARE_DEADLINES = 1024
"""Of operations that have ended, beside as many as run: at more they are looked for."""
_UNREPORTED = 255
_BLANK = bytes([_UNREPORTED])
_OK = PageStatus.OK
_GOOD = bytes([_OK])
WHOLE = ""
"""In place of a component: what is asked of a rank as a whole."""
Leg = tuple[int, str]
"""A rank and a component."""


class OperationKind(enum.StrEnum):
    BACKUP = "backup"
    LOAD = "load"
    WRITE = "write"
    FETCH = "fetch"
    SERVE = "serve"
    PROBE = "probe"
    STORE = "store"


_IN_PIECES = (OperationKind.WRITE, OperationKind.FETCH)


class OpState(enum.Enum):
    RUNNING = enum.auto()
    OVERDUE = enum.auto()
    ENDED = enum.auto()


# By a plain name, as in quire.types: every request looks at these.
BACKUP, WRITE, PROBE = OperationKind.BACKUP, OperationKind.WRITE, OperationKind.PROBE
RUNNING, OVERDUE, ENDED = OpState.RUNNING, OpState.OVERDUE, OpState.ENDED


class Operation(msgspec.Struct, eq=False):
    id: OperationId
    kind: OperationKind
    num_pages: int
    """Pages of its first component; for a probe, queries."""
    started_s: float
    timeout_s: float
    deadline_s: float
    """`timeout_s` after its start, or after the last report that brought something."""
    legs: dict[Leg, bytes]
    """Statuses per leg; _UNREPORTED where nothing has come yet."""
    open_legs: set[Leg]
    on_report: Callable[[Operation], None]
    """Called with every report, the ending one included, and once when it becomes overdue."""
    guards: list[Guard] = []
    """Locks held until it ends."""
    state: OpState = OpState.RUNNING
    hits: list[int] | None = None
    """Probe only: leading pages present per query, minimum over the legs that count."""
    paces: list[float] = []
    """Probe only: see Probed; of the slowest rank."""
    present: dict[str, list[bytes]] | None = None
    """Probe only: per component asked page by page, and per query, which pages are there (1)."""
    keys: bytes = b""
    """Write only: keys of its pages, once a worker has computed them."""
    error: str = ""
    """The first rank's complaint, for operations whose outcome is not per page."""
    reported_s: float = 0.0
    """When the last report was made, which may be long before it was read."""
    seconds: float = 0.0
    """The longest that bytes of one report took to move; 0: unknown."""

    def agreed_pages(self) -> int:
        """Leading pages that every leg reports OK. For operations on one component."""
        return min(_leading_ok(statuses) for statuses in self.legs.values())

    def page_statuses(self) -> bytes:
        """Worst status of each page over the ranks, component after component; what was never
        reported is FAILED."""
        merged: list[int] = []
        for component in dict.fromkeys(name for _, name in self.legs):
            legs = [leg for (_, name), leg in self.legs.items() if name == component]
            merged += legs[0] if len(legs) == 1 else map(max, *legs)
        return bytes(PageStatus.FAILED if s == _UNREPORTED else s for s in merged)

    def all_ok(self) -> bool:
        return not b"".join(self.legs.values()).strip(_GOOD)


def _leading_ok(statuses: bytes) -> int:
    return len(statuses) - len(statuses.lstrip(b"\0"))


@dataclass(slots=True)
class Ended:
    """Operations of one kind that have ended, and how long they took from start to last report."""

    count: int = 0
    seconds: float = 0.0


class Operations:
    def __init__(
        self, num_ranks: int, components: Iterable[str], clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self.ended: dict[OperationKind, Ended] = {kind: Ended() for kind in OperationKind}
        names = [*components, WHOLE]
        self._legs = {name: [(rank, name) for rank in range(num_ranks)] for name in names}
        """By component."""
        self.num_started = 0
        self.deadlines: list[tuple[float, OperationId]] = []
        """A heap. They only ever move away: none is earlier than its first."""
        self.running: dict[OperationId, Operation] = {}
        self.num_running = dict.fromkeys(OperationKind, 0)
        self.lost_ranks: dict[int, str] = {}

    def start(
        self,
        kind: OperationKind,
        sizes: dict[str, int],
        *,
        timeout_s: float,
        on_report: Callable[[Operation], None],
        guards: list[Guard] | None = None,
    ) -> Operation:
        """`sizes`: pages per component, the first one's first."""
        legs: dict[Leg, bytes] = {}
        for name, size in sizes.items():
            blank = _BLANK * size
            for leg in self._legs[name]:
                legs[leg] = blank
        first = next(iter(sizes.values()))
        self.num_started += 1
        now, op_id = self._clock(), OperationId(self.num_started)
        deadline_s = now + timeout_s
        op = self.running[op_id] = Operation(
            op_id, kind, first, now, timeout_s, deadline_s, legs, set(legs), on_report, guards or []
        )
        self.num_running[kind] += 1
        if len(self.deadlines) > 2 * len(self.running) + SPARE_DEADLINES:
            self._drop_ended()
        heapq.heappush(self.deadlines, (deadline_s, op_id))
        return op

    def _drop_ended(self) -> None:
        """Of operations that have ended deadlines stay behind those of others that run for long."""
        self.deadlines = [d for d in self.deadlines if d[1] in self.running]
        heapq.heapify(self.deadlines)

    def transferred(self, report: Transferred) -> bool:
        """Take in a report. False: no such operation (any more)."""
        op = self.running.get(report.op)
        leg = (report.rank, report.component)
        if op is None or leg not in op.open_legs:
            return False
        first, statuses, before = report.first, report.statuses, op.legs[leg]
        end, now = first + len(statuses), self._clock()
        sensible = first >= 0 and end <= len(before)
        if sensible:  # else a confused worker: its pages stay unreported, hence not OK
            if end - first < len(before):
                statuses = before[:first] + statuses + before[end:]
            op.legs[leg] = statuses
            op.reported_s = now if report.at_s is None else report.at_s
            if op.kind in _IN_PIECES and _OK in report.statuses:
                op.deadline_s = now + op.timeout_s
            op.keys = op.keys or report.keys
            if report.seconds:
                op.seconds = max(op.seconds, report.seconds)
        self._advance(op, leg if report.final else None, now)
        return sensible

    def probed(self, report: Probed) -> bool:
        op, leg = self.running.get(report.op), (report.rank, report.component)
        if op is None or leg not in op.open_legs:
            return False
        num_answers = len(report.hits) + len(report.present)
        if num_answers != op.num_pages or (report.hits and report.present):
            op.error = op.error or f"rank {leg[0]} answered {num_answers} of {op.num_pages} queries"
        elif report.hits:
            op.hits = report.hits if op.hits is None else list(map(min, op.hits, report.hits))
            if len(report.paces) == op.num_pages:
                op.paces = list(map(max, op.paces or report.paces, report.paces))
        else:
            op.present = op.present or {}
            before = op.present.get(report.component, report.present)
            both = zip(before, report.present, strict=True)
            op.present[report.component] = [bytes(map(min, a, b)) for a, b in both]
        self._advance(op, leg, self._clock())
        return True

    def store_changed(self, op_id: OperationId, rank: int, error: str) -> bool:
        op, leg = self.running.get(op_id), (rank, WHOLE)
        if op is None or leg not in op.open_legs:
            return False
        op.error = op.error or error
        self._advance(op, leg, self._clock())
        return True

    def lose_rank(self, rank: int, reason: str) -> None:
        """The rank will never report again: its legs end as they are, unreported pages failed."""
        self.lost_ranks[rank] = reason
        for op in list(self.running.values()):
            for leg in [leg for leg in op.open_legs if leg[0] == rank]:
                op.error = op.error or f"rank {rank} is lost: {reason}"
                self._advance(op, leg, self._clock())

    def expire(self, now: float) -> int:
        """Mark overdue operations and tell their owners. Returns how many."""
        count = 0
        while (due := self.next_deadline()) is not None and due <= now:
            op = self.running[heapq.heappop(self.deadlines)[1]]
            op.state = OpState.OVERDUE
            count += 1
            op.on_report(op)
        return count

    @property
    def is_copying(self) -> bool:
        """Between device and host: that it has ended is found out by asking the workers, who tell
        of I/O by themselves."""
        return bool(self.num_running[OperationKind.BACKUP] or self.num_running[OperationKind.LOAD])

    def next_deadline(self) -> float | None:
        heap = self.deadlines
        if not self.running:
            heap.clear()
        while heap:
            due, op_id = heap[0]
            op = self.running.get(op_id)
            if op is not None and op.deadline_s == due:
                return due
            heapq.heappop(heap)
            if op is not None:  # it has moved meanwhile
                heapq.heappush(heap, (op.deadline_s, op_id))
        return None

    def _advance(self, op: Operation, ended_leg: Leg | None, now: float) -> None:
        if ended_leg is not None:
            op.open_legs.discard(ended_leg)
            if not op.open_legs:
                op.state = ENDED
                del self.running[op.id]
                self.num_running[op.kind] -= 1
                ended = self.ended[op.kind]
                ended.count += 1
                ended.seconds += now - op.started_s
        op.on_report(op)
