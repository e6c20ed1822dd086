"""Probes: how long a prefix does the store have?

Asked by galloping: for one page, then for as many more as make it four times as many, and so on
until a page is missing. A miss at the first page costs one key; a long hit a few questions. Where
answers are slow, the second question is for all the rest. The questions of a step travel together,
in one command per component.

Knows prefetches and the workers' answers; not what is done with what was found.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.manager.core import Core
from quire.manager.counters import Decline
from quire.manager.fetches.base import GRACE_S, PROBING, Prefetch, point_before
from quire.manager.operations import ENDED, PROBE, RUNNING, Operation
from quire.messages import Probe
from quire.types import OperationId

TIMEOUT_S = 5.0
_STRIDE = 4


class Probes:
    def __init__(
        self,
        core: Core,
        found: Callable[[Prefetch], None],
        decline: Callable[[Prefetch, Decline], None],
    ) -> None:
        self._core = core
        self._found = found
        self._decline = decline
        self._names = [component.name for component in core.components]
        self.queued: list[Prefetch] = []
        self._asked: dict[OperationId, list[tuple[Prefetch, int]]] = {}
        """Who is asked about, and up to which page."""

    def flush(self) -> None:
        """Send the questions of this step."""
        batch = [p for p in self.queued if p.state is PROBING]
        self.queued = []
        core = self._core
        if not batch:  # settled since
            return
        if not core.healthy or not core.store_epoch:  # lost or detached since
            for prefetch in batch:
                lost = Decline.NO_STORE if core.healthy else Decline.WORKER_LOST
                self._decline(prefetch, lost)
            return
        op = core.operations.start(
            PROBE,
            dict.fromkeys(self._names, len(batch)),
            timeout_s=TIMEOUT_S + GRACE_S,
            on_report=self._reported,
        )
        asked, queries = [], []
        slow_since_s = core.clock() - TIMEOUT_S
        for prefetch in batch:
            key, first, num_asked = prefetch.key, prefetch.first, prefetch.num_asked
            end = min(key.last, first + (num_asked * _STRIDE or 1))
            if num_asked and prefetch.started_s <= slow_since_s:
                end = key.last
            asked.append((prefetch, end))
            queries.append(key.path.keys(first + num_asked, end))
        for component in core.components:
            each = component.index > 0
            core.outbox.append(Probe(op.id, component.name, queries, TIMEOUT_S, each))
        self._asked[op.id] = asked

    def _reported(self, op: Operation) -> None:
        if op.state is RUNNING:
            return
        asked = self._asked.pop(op.id, [])  # empty when it was overdue before it ended
        hits = op.hits if op.state is ENDED and not op.error else None
        for index, (prefetch, end) in enumerate(asked):
            if prefetch.state is not PROBING:
                continue  # settled meanwhile
            if hits is None:
                reason = Decline.PROBE_FAILED if self._core.healthy else Decline.WORKER_LOST
                self._decline(prefetch, reason)
            else:
                self._answered(prefetch, end, hits[index], op, index)

    def _answered(self, prefetch: Prefetch, end: int, hit: int, op: Operation, index: int) -> None:
        components, first = self._core.components, prefetch.first
        size = end - first - prefetch.num_asked
        if hit <= 0 and not prefetch.num_asked:
            self._found(prefetch)  # the store has nothing of it: what most answers say
            return
        prefetch.known[0] += bytes(size)
        for component in components[1:]:
            answers = (op.present or {}).get(component.name)
            present = (answers[index] if answers else b"")[:size].ljust(size, b"\0")
            prefetch.known[component.index] += present
        here, before = max(0, min(hit, size)), prefetch.num_asked
        if op.paces and here:
            prefetch.pace = (prefetch.pace * before + op.paces[index] * here) / (before + here)
        prefetch.num_asked += here
        if hit >= size and end < prefetch.key.last:
            self.queued.append(prefetch)
            return
        point = point_before(components, prefetch.known, first, first + prefetch.num_asked)
        prefetch.num_hit = point - first
        self._found(prefetch)
