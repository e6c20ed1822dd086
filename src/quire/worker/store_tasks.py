"""The operations of a worker on the store: write and fetch page by page, probe a batch of
prefixes, touch a path.

Knows one operation at a time and its store; how it comes to an end is tasks.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quire.memory.host import HostPool
from quire.messages import Disown, Fetch, Probe, Probed, Touch, Write
from quire.store.base import STEP_NS, Part, pages_per_call
from quire.types import PAGE_KEY_BYTES, PageKey, PageStatus, split_keys
from quire.worker.attachment import StoreLease
from quire.worker.lanes import Once
from quire.worker.tasks import IoTask, PageTask, Reporter


class StoreTask(PageTask):
    """A write to the store, or a fetch from it. The pages of a fetch come in any order; those of a
    write go in order, so that a page is not there before the one that it needs."""

    def __init__(
        self,
        command: Write | Fetch,
        reporter: Reporter,
        *,
        part: Part,
        host: HostPool,
        batch_pages: int,
        lease: StoreLease,
        used_ns: int,
        ahead: PageTask | None = None,
    ) -> None:
        """The command's pages and keys have been checked."""
        batch_pages = min(batch_pages, pages_per_call(part.page_bytes))
        super().__init__(
            command, reporter, batch_pages=batch_pages, let_go=lease.release, ahead=ahead
        )
        self.wide = isinstance(command, Fetch)
        self._part = part
        self._host = host
        self._store = lease.store
        self._used_ns = used_ns
        self._keys = split_keys(command.keys) if isinstance(command, Fetch) else []
        self._parents: list[PageKey] = []
        self._owners = command.owners() if isinstance(command, Write) else []

    def _move(self, first: int, end: int) -> list[PageStatus]:
        if isinstance(self._command, Write) and not self._keys:
            self._keys, self._parents = self._command.keys_and_parents()
            self._found_keys = b"" if self._command.has_keys else b"".join(self._keys)
        keys = self._keys[first:end]
        views = [self._host.page_view(page) for page in self._pages[first:end].tolist()]
        if isinstance(self._command, Fetch):
            return self._store.get(self._part, keys, views, deadline=self._deadline)
        return self._store.put(
            self._part,
            keys,
            views,
            deadline=self._deadline,
            parents=self._parents[first:end],
            owners=self._owners[first:end],
            used_ns=self._used_ns - first * STEP_NS,
        )

    def _used(self) -> None:
        if isinstance(self._command, Fetch):
            came = len(self._statuses) - len(self._statuses.lstrip(bytes([PageStatus.OK])))
            self._store.touch(self._part, self._keys[:came], used_ns=self._used_ns)

    def _stops_at(self, statuses: list[PageStatus]) -> PageStatus | None:
        """A prefix ends at its first missing page, so a fetch has no use for those behind it."""
        if isinstance(self._command, Write):
            return None
        bad = next((status for status in statuses if status is not PageStatus.OK), None)
        if bad in (None, PageStatus.TIMEOUT, PageStatus.CANCELLED):
            return bad
        return PageStatus.MISS


class ProbeTask(IoTask):
    """What of each query is in L3: one question to the store for all of them."""

    holds_pages = False

    def __init__(
        self, command: Probe, reporter: Reporter, *, part: Part, lease: StoreLease
    ) -> None:
        super().__init__(reporter, command.timeout_s, lease.release)
        self._command = command
        self._part = part
        self._lease = lease
        self._asked = False
        self._found = nothing_of(command)
        self._paces: list[float] = []

    def _next_piece(self) -> Callable[[], None] | None:
        if self._asked:
            return None
        self._asked = True
        return self._ask

    def _is_complete(self) -> bool:
        return self._asked

    def _ask(self) -> None:
        queries = [split_keys(query) for query in self._command.queries]
        found = self._lease.store.find(
            self._part, queries, deadline=self._deadline, each=self._command.each
        )
        if list(map(len, found)) != list(map(len, queries)):
            raise ValueError(f"store answered {len(found)} of {len(queries)} queries")
        paces = [] if self._command.each else self._paces_of(queries, found)
        with self._lock:
            if not self._is_over:
                self._found, self._paces = found, paces

    def _paces_of(self, queries: list[list[PageKey]], found: list[bytes]) -> list[float]:
        """None, if all take as long as ever: that is how it is with one store."""
        pace = partial(self._lease.store.pace, self._part)
        paces = [pace(keys[: sum(hit)]) for keys, hit in zip(queries, found, strict=True)]
        return paces if any(each != 1.0 for each in paces) else []

    def _final_report(self) -> None:
        # No answer in time, or none wanted any more: nothing is promised.
        report = probed(self._command, self._reporter.rank, self._found, self._paces)
        self._reporter.report(report)


def touch_task(
    command: Touch, reporter: Reporter, *, part: Part, lease: StoreLease, used_ns: int
) -> Once:
    """Pages used in other tiers. Nobody is told."""

    def touch() -> None:
        keys = split_keys(command.keys)
        try:
            lease.store.touch(part, keys, used_ns=used_ns, each=command.each)
        finally:
            lease.release()

    return Once(touch, fail=reporter.count_error, cancel=lease.release)


def disown_task(command: Disown, reporter: Reporter, *, part: Part, lease: StoreLease) -> Once:
    """Pages that are wrong: misses as soon as this returns, and taken out when it is its turn.
    Nobody is told."""
    take_out = lease.store.disown(part, split_keys(command.keys))

    def disown() -> None:
        try:
            take_out()
        finally:
            lease.release()

    return Once(disown, fail=reporter.count_error, cancel=lease.release)


def probed(command: Probe, rank: int, found: list[bytes], paces: Sequence[float] = ()) -> Probed:
    """The answer to a probe: per query, one byte for each of its pages."""
    if command.each:
        return Probed(command.op, rank, command.component, present=found)
    hits = list(map(sum, found))
    return Probed(command.op, rank, command.component, hits=hits, paces=list(paces))


def nothing_of(command: Probe) -> list[bytes]:
    return [bytes(len(query) // PAGE_KEY_BYTES) for query in command.queries]
