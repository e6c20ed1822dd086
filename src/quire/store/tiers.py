"""Tiers: several stores in front of each other, as one. A fast pool before a slow, durable one.

    find    all are asked at once; a page is there when any has it, also one that lies behind a hole
            in that store, if another fills it
    get     each page from the fastest that said it has it; what does not come, from the next
    put     by each store's policy:   through   before the call ends
                                      back      later, from a copy, if there is room for one
                                      never     it is only read

Each is a PageStore with its own breaker, counters, checksums and packing: one that is slow, full
or gone costs what it would cost alone, and the others go on. A page is written when any store has
taken it. One that lacks the page before it says so (ORPHAN), and the leader writes the whole path
again, which costs the others nothing: so a store that comes back empty is filled. A store that
takes nothing at the moment is not listened to in this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import msgspec

from quire.errors import StoreError
from quire.store.account import StoreHealth
from quire.store.backlog import Backlog, PutCall
from quire.store.base import Part, WriteWhen
from quire.store.client import PageStore
from quire.store.counters import StoreCounters, by_outcome
from quire.store.helpers import Helpers
from quire.store.paths import touch_found, up_to_hole
from quire.store.whereabouts import Whereabouts
from quire.types import NO_PARENT, Owner, PageKey, PageStatus

BACKLOG_BYTES = 256 << 20
THREADS = 16
"""Of each store, at most."""
MAX_TOUCHES = 64
UNWILLING_S = 30.0
"""So long a store that took nothing is not listened to when it lacks a page."""

_OK, _MISS, _ORPHAN = PageStatus.OK, PageStatus.MISS, PageStatus.ORPHAN
_NOT_TAKEN = (PageStatus.REJECTED, PageStatus.FAILED, PageStatus.TIMEOUT)


class StoreTier(NamedTuple):
    pages: PageStore
    write: WriteWhen


class _Wanted(NamedTuple):
    part: Part
    keys: list[PageKey]
    pages: list[memoryview]


class Tiers:
    """Thread-safe, as a PageStore. `deadline`s are on `clock`."""

    def __init__(
        self,
        tiers: Sequence[StoreTier],
        *,
        clock: Callable[[], float],
        backlog_bytes: int = BACKLOG_BYTES,
    ) -> None:
        """The fastest first."""
        self._tiers = list(tiers)
        self._clock = clock
        self._where = Whereabouts(len(tiers))
        self._helpers = [Helpers(f"quire-store{index}", THREADS) for index in range(len(tiers))]
        """Of each its own: one that hangs keeps none from the others."""
        self._backlogs = {
            index: Backlog(tier.pages, clock=clock, max_bytes=backlog_bytes)
            for index, tier in enumerate(tiers)
            if tier.write is WriteWhen.BACK
        }
        self._through = [i for i, tier in enumerate(tiers) if tier.write is WriteWhen.THROUGH]
        self._unwilling_until = [float("-inf")] * len(tiers)
        self._counters = StoreCounters("read_bytes", "written_bytes", "probed_pages", "probe_hits")

    # ---- pages ----------------------------------------------------------------------------------

    def find(
        self,
        part: Part,
        queries: Sequence[Sequence[PageKey]],
        *,
        deadline: float,
        each: bool = False,
        uses: bool = True,
    ) -> list[bytes]:
        """Nobody is waited for when another has all of it."""
        found = [bytes(len(query)) for query in queries]
        asked: dict[Future[list[bytes]], int] = {}
        for index, tier in enumerate(self._tiers):
            ask = partial(tier.pages.find, part, queries, deadline=deadline, each=True, uses=False)
            asked[self._helpers[index].start(ask)] = index
        while asked and not all(map(all, found)):
            left_s = max(0.0, deadline - self._clock())
            answered, _ = wait(asked, timeout=left_s, return_when=FIRST_COMPLETED)
            if not answered:
                self._counters.count("declined:late")
                break
            for call in answered:
                self._take_in(part, queries, asked.pop(call), call, found)
        for call in asked:
            call.cancel()
        if not each:
            found = [up_to_hole(there) for there in found]
        if uses:
            touch_found(self, part, queries, found, each=each)
        hits = {"probed_pages": sum(map(len, found)), "probe_hits": sum(map(sum, found))}
        self._counters.add(hits)
        return found

    def pace(self, part: Part, keys: Sequence[PageKey]) -> float:
        return self._where.pace(part, keys)

    def touch(
        self,
        part: Part,
        keys: Sequence[PageKey],
        *,
        used_ns: int | None = None,
        each: bool = False,
    ) -> None:
        """Nobody waits for it, and it is left out when there is much to do."""
        for tier, helpers in zip(self._tiers, self._helpers, strict=True):
            if tier.write is not WriteWhen.NEVER and helpers.num_open < MAX_TOUCHES:
                helpers.start(
                    partial(tier.pages.touch, part, list(keys), used_ns=used_ns, each=each)
                )

    def disown(self, part: Part, keys: Sequence[PageKey]) -> Callable[[], None]:
        """Of every tier, also of those that are only read: there it is tried."""
        acts = [tier.pages.disown(part, keys) for tier in self._tiers]
        self._where.forget(part, keys)

        def take_out() -> None:
            for act, helpers in zip(acts, self._helpers, strict=True):
                helpers.start(act)

        return take_out

    def get(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
    ) -> list[PageStatus]:
        order = self._where.order()
        plans = [self._where.candidates(part, key, order) for key in keys]
        statuses = [_MISS] * len(keys)
        for turn in range(len(self._tiers)):
            for index, here in _by_store(plans, statuses, turn).items():
                # Who comes next, if this one does not answer, needs time too.
                has_next = any(len(plans[i]) > turn + 1 for i in here)
                left_s = max(0.0, deadline - self._clock())
                until = deadline - left_s / 2 if has_next else deadline
                wanted = _Wanted(part, [keys[i] for i in here], [pages[i] for i in here])
                for i, status in zip(here, self._read(index, wanted, until), strict=True):
                    if status is _OK or statuses[i] is _MISS:
                        statuses[i] = status
        num_bytes = statuses.count(_OK) * part.page_bytes
        self._counters.add(by_outcome("read", statuses) | {"read_bytes": num_bytes})
        return statuses

    def put(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        parents: Sequence[PageKey] = (),
        owners: Sequence[Owner | None] = (),
        used_ns: int | None = None,
    ) -> list[PageStatus]:
        """Returns, or raises, when all stores that are written through have let go of the pages."""
        call = PutCall(part, keys, pages, parents, used_ns, owners)
        with ExitStack() as held:
            started = {}
            for index in self._through:
                store = self._tiers[index].pages
                held.enter_context(store.writing(part, keys))
                future = self._helpers[index].start(partial(call.to, store, deadline))
                held.callback(_end, future)
                started[index] = future
            answers = [_later(backlog, call) for backlog in self._backlogs.values()]
            for index, future in started.items():
                answers.append(self._written(index, future, len(keys), deadline))
        self._where.forget(part, keys)
        statuses = [_merged(each) for each in zip(*answers, strict=True)]
        if not answers:  # all of them are only read
            statuses = [PageStatus.REJECTED] * len(keys)
        num_bytes = statuses.count(_OK) * part.page_bytes
        self._counters.add(by_outcome("written", statuses) | {"written_bytes": num_bytes})
        return statuses

    # ---- all of it ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Those that are only read stay as they are. Raises what the first that fails raises,
        when all were told."""
        failures: list[Exception] = []
        for tier in self._tiers:
            if tier.write is WriteWhen.NEVER:
                continue
            try:
                tier.pages.clear()
            except (OSError, StoreError) as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def counters(self) -> dict[str, int]:
        """Of all together, by outcome; and of each store, as `store0.NAME`."""
        counts = self._counters.snapshot()
        each = [tier.pages.counters() for tier in self._tiers]
        for index, of_one in enumerate(each):
            counts |= {f"store{index}.{name}": count for name, count in of_one.items()}
        for index, backlog in self._backlogs.items():
            waiting = backlog.counters.snapshot().items()
            counts |= {f"store{index}.{name}": count for name, count in waiting}
        counts["breaker_opened"] = sum(of_one["breaker_opened"] for of_one in each)
        return counts

    def health(self) -> list[StoreHealth]:
        found = []
        for tier, seconds in zip(self._tiers, self._where.seconds_per_page(), strict=True):
            took_us = None if seconds is None else round(seconds * 1e6)
            for health in tier.pages.health():
                found.append(msgspec.structs.replace(health, read_us_per_page=took_us))
        return found

    def close(self, timeout_s: float = 5.0) -> None:
        for backlog in self._backlogs.values():
            backlog.close(timeout_s)
        for tier in self._tiers:
            tier.pages.close(timeout_s)
        for helpers in self._helpers:
            helpers.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _take_in(
        self,
        part: Part,
        queries: Sequence[Sequence[PageKey]],
        index: int,
        call: Future[list[bytes]],
        found: list[bytes],
    ) -> None:
        error = call.exception()
        if error is not None:
            self._counters.error(error)
            return
        for at, (query, answer) in enumerate(zip(queries, call.result(), strict=True)):
            self._where.learn(part, query, answer, index)
            found[at] = bytes(a | b for a, b in zip(found[at], answer, strict=True))

    def _read(self, index: int, wanted: _Wanted, deadline: float) -> list[PageStatus]:
        part, keys, pages = wanted
        began_s = self._clock()
        answers = self._tiers[index].pages.get(part, keys, pages, deadline=deadline)
        self._where.measured(index, answers.count(_OK), self._clock() - began_s)
        gone = [key for key, status in zip(keys, answers, strict=True) if status is _MISS]
        self._where.learn(part, gone, bytes(len(gone)), index)
        return answers

    def _written(
        self, index: int, future: Future[list[PageStatus]], count: int, deadline: float
    ) -> list[PageStatus]:
        """A call that has begun uses the pages until it ends; one that has not is not begun."""
        wait([future], timeout=max(0.0, deadline - self._clock()))
        if future.cancel():
            statuses = [PageStatus.TIMEOUT] * count
        elif (error := future.exception()) is not None:
            self._counters.error(error)
            statuses = [PageStatus.FAILED] * count
        else:
            statuses = future.result()
        if any(status in _NOT_TAKEN for status in statuses):
            self._unwilling_until[index] = self._clock() + UNWILLING_S
        if self._clock() < self._unwilling_until[index]:
            return [PageStatus.REJECTED if s is _ORPHAN else s for s in statuses]
        return statuses


def _end(call: Future[list[PageStatus]]) -> None:
    """Whatever became of the others: while it runs, it uses the pages."""
    if not call.cancel():
        wait([call])


def _by_store(
    plans: Sequence[Sequence[int]], statuses: Sequence[PageStatus], turn: int
) -> dict[int, list[int]]:
    """Pages that have not come, by the store to look in now."""
    groups: dict[int, list[int]] = {}
    for i, plan in enumerate(plans):
        if statuses[i] is not _OK and turn < len(plan):
            groups.setdefault(plan[turn], []).append(i)
    return groups


def _later(backlog: Backlog, call: PutCall) -> list[PageStatus]:
    status = _OK if backlog.add(call) else PageStatus.REJECTED
    return [
        _ORPHAN if parent != NO_PARENT and backlog.misses(parent) else status
        for parent in call.parents or [NO_PARENT] * len(call.keys)
    ]


def _merged(answers: Sequence[PageStatus]) -> PageStatus:
    """Of one page, what it comes to."""
    if _ORPHAN in answers:
        return _ORPHAN
    return _OK if _OK in answers else answers[-1]
