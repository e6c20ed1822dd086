"""`PageStore`: what a worker uses. Pages in, pages out, every one sealed and verified.

Sits on any `Store` and trusts none: it seals what goes in, verifies what comes out, turns every
fault into a per-page status with a counted reason, and stops asking a store that does not answer.
Knows nothing of prefixes, tiers or files.

A call returns only when the store has let go of every page handed to it, because the pages are
read and written in place. Deadlines are therefore checked between chunks and by the store between
objects; a store stuck inside one object holds that call, and other calls are declined meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.store.base import Blob, ObjectName, Part, Store, StoreStats
from quire.store.breaker import Breaker
from quire.store.codec import Mismatch, check, check_header, object_name, seal
from quire.store.counters import Counters, PageStoreStats
from quire.store.headers import HeaderPool
from quire.store.lanes import Batch, Lanes
from quire.types import PageKey, PageStatus

MAX_CHUNK = 8
"""Pages per call of the store: enough to keep a disk or a network busy, few enough to spread a
batch."""

STALL_GRACE_S = 1.0
"""A call this long past its deadline means that the store is stuck, not merely late."""

_FAULTS = (PageStatus.FAILED, PageStatus.TIMEOUT)


def _never() -> bool:
    return False


class PageStore:
    """Thread-safe. `deadline`s are absolute, on `clock`."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        breaker: Breaker | None = None,
        read_threads: int = 4,
        write_threads: int = 2,
    ) -> None:
        """Threads come on top of the calling ones. Reads and writes have their own, so that
        write-behind never delays a prefetch."""
        self._store = store
        self._clock = clock
        self._breaker = breaker or Breaker(clock)
        self._readers = Lanes(read_threads, "quire-store-read")
        self._writers = Lanes(write_threads, "quire-store-write")
        self._probers = Lanes(1, "quire-store-probe")
        self._headers = HeaderPool(MAX_CHUNK)
        self._counters = Counters()
        self._calls = threading.Condition()
        self._deadlines: dict[object, float] = {}
        self._closed = False

    @property
    def url(self) -> str:
        return self._store.url

    def contains_prefix(
        self, part: Part, queries: Sequence[Sequence[PageKey]], *, deadline: float
    ) -> list[int]:
        """Leading pages present, per query; zeros when the store does not answer in time.

        May be optimistic: get() decides.
        """
        present = self._present(part, queries, deadline)
        hits = [_leading(query, present) for query in queries]
        self._counters.probed(sum(map(len, queries)), sum(hits))
        return hits

    def contains_each(
        self, part: Part, queries: Sequence[Sequence[PageKey]], *, deadline: float
    ) -> list[bytes]:
        """Which pages are present, per query, one byte each; otherwise as contains_prefix."""
        present = self._present(part, queries, deadline)
        found = [bytes(key in present for key in query) for query in queries]
        self._counters.probed(sum(map(len, queries)), sum(map(sum, found)))
        return found

    def _present(
        self, part: Part, queries: Sequence[Sequence[PageKey]], deadline: float
    ) -> set[PageKey]:
        # Prompts of one group share their beginning: each page is asked for once.
        keys = list(dict.fromkeys(key for query in queries for key in query))
        if not keys or self._why_declined() or not self._enter_breaker():
            return set()
        names = [object_name(part, key) for key in keys]
        answer: list[list[bool]] = []
        answered = threading.Event()

        def ask() -> None:
            with self._call(deadline):
                try:
                    answer.append(list(self._store.contains(names, deadline=deadline)))
                except Exception as error:  # the boundary to a backend: see base.py
                    self._counters.error(error)
            answered.set()

        self._probers.submit(ask)
        answered.wait(max(0.0, deadline - self._clock()))
        if not answer or len(answer[0]) != len(keys):
            self._breaker.failure()
            return set()
        self._breaker.success()
        return {key for key, there in zip(keys, answer[0], strict=True) if there}

    def get(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        stop_at_miss: bool = False,
        cancelled: Callable[[], bool] = _never,
    ) -> list[PageStatus]:
        """Read each page in place. Only an OK page's bytes mean anything.

        With `stop_at_miss`, pages behind the first one that did not come may be left CANCELLED.
        """
        _check_pages(part, keys, pages)
        statuses = [PageStatus.CANCELLED] * len(keys)
        failed = threading.Event()

        def read(first: int, end: int) -> None:
            statuses[first:end] = self._read(part, keys[first:end], pages[first:end], deadline)
            if any(status is not PageStatus.OK for status in statuses[first:end]):
                failed.set()

        def stop() -> PageStatus | None:
            if cancelled() or (stop_at_miss and failed.is_set()):
                return PageStatus.CANCELLED
            return PageStatus.TIMEOUT if self._clock() >= deadline else None

        self._run(statuses, read, stop, self._readers, deadline)
        self._counters.read(statuses, part.page_bytes)
        return statuses

    def put(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        cancelled: Callable[[], bool] = _never,
    ) -> list[PageStatus]:
        """Publish each page. One the store has already is OK, and is neither hashed nor sent."""
        _check_pages(part, keys, pages)
        statuses = [PageStatus.CANCELLED] * len(keys)

        def write(first: int, end: int) -> None:
            statuses[first:end] = self._write(part, keys[first:end], pages[first:end], deadline)

        def stop() -> PageStatus | None:
            if cancelled():
                return PageStatus.CANCELLED
            return PageStatus.TIMEOUT if self._clock() >= deadline else None

        self._run(statuses, write, stop, self._writers, deadline)
        self._counters.wrote(statuses)
        return statuses

    def clear(self) -> int:
        """Remove every object of the store, of every model. Returns how many. Raises OSError."""
        return self._store.clear()

    def stats(self) -> PageStoreStats:
        try:
            store = self._store.stats()
        except Exception as error:  # the boundary to a backend: statistics never fail a caller
            self._counters.error(error)
            store = StoreStats()
        return self._counters.snapshot(self._breaker.state, self._breaker.times_opened, store)

    def counters(self) -> dict[str, int]:
        """What this client has counted. Never asks the store: safe where nothing may block."""
        state, opened = self._breaker.state, self._breaker.times_opened
        return self._counters.snapshot(state, opened, StoreStats()).flat()

    def close(self, timeout_s: float = 5.0) -> None:
        """Decline new calls, give running ones `timeout_s` to finish, close the store."""
        with self._calls:
            if self._closed:
                return
            self._closed = True
            self._calls.wait_for(lambda: not self._deadlines, timeout_s)
        for lanes in (self._readers, self._writers, self._probers):
            lanes.close(timeout_s)
        self._store.close()

    # ---- one call ---------------------------------------------------------------------------

    def _run(
        self,
        statuses: list[PageStatus],
        work: Callable[[int, int], None],
        stop: Callable[[], PageStatus | None],
        lanes: Lanes,
        deadline: float,
    ) -> None:
        """Fill `statuses` by `work`, in parallel, minding breaker, stalls and deadline."""
        if not statuses:
            return
        if self._why_declined() or not self._enter_breaker():
            statuses[:] = [PageStatus.REJECTED] * len(statuses)
            return
        chunk = max(1, min(MAX_CHUNK, len(statuses) // (2 * lanes.num_threads or 1)))
        batch = Batch(len(statuses), chunk, work, stop)
        with self._call(deadline):
            batch.run(lanes)
        if batch.stopped is not None:
            statuses[batch.taken :] = [batch.stopped] * (len(statuses) - batch.taken)
        self._judge(statuses[: batch.taken])

    def _judge(self, answered: Sequence[PageStatus]) -> None:
        """Tell the breaker. A call failed when most of its pages got no answer: a slow store that
        still delivers is of use. Pages never asked for say nothing about the store."""
        num_faults = sum(status in _FAULTS for status in answered)
        if not answered:
            self._breaker.leave()
        elif 2 * num_faults > len(answered):
            self._breaker.failure()
        else:
            self._breaker.success()

    def _enter_breaker(self) -> bool:
        if self._breaker.enter():
            return True
        self._counters.declined("breaker_open")
        return False

    def _why_declined(self) -> str:
        with self._calls:
            overdue = self._clock() - STALL_GRACE_S
            stalled = any(deadline < overdue for deadline in self._deadlines.values())
            reason = "closed" if self._closed else "stalled" if stalled else ""
        if reason:
            self._counters.declined(reason)
        return reason

    @contextmanager
    def _call(self, deadline: float) -> Iterator[None]:
        call = object()
        with self._calls:
            self._deadlines[call] = deadline
        try:
            yield
        finally:
            with self._calls:
                del self._deadlines[call]
                self._calls.notify_all()

    # ---- one chunk --------------------------------------------------------------------------

    def _read(
        self, part: Part, keys: Sequence[PageKey], pages: Sequence[memoryview], deadline: float
    ) -> list[PageStatus]:
        names = [object_name(part, key) for key in keys]
        with self._headers.borrow() as headers:
            blobs = [Blob(header, page) for header, page in zip(headers, pages, strict=False)]
            for blob in blobs:
                blob.header[:8] = bytes(8)  # what an earlier page left there must not pass for new
            statuses = self._ask(lambda: self._store.get(names, blobs, deadline=deadline), names)
            for i, status in enumerate(statuses):
                if status in (PageStatus.OK, PageStatus.CORRUPT):
                    statuses[i] = self._verify(part, keys[i], blobs[i], status)
        return statuses

    def _verify(self, part: Part, key: PageKey, blob: Blob, status: PageStatus) -> PageStatus:
        reason: Mismatch | None
        if status is PageStatus.OK:
            reason = check(part, key, blob.header, blob.payload)
        else:  # the object was too short or too long; its header may tell whose it is
            found = check_header(part, key, blob.header)
            foreign = isinstance(found, Mismatch) and found.is_foreign
            reason = found if isinstance(found, Mismatch) and foreign else Mismatch.LENGTH
        if reason is None:
            return PageStatus.OK
        if reason.is_foreign:
            self._counters.mismatch(reason)
            return PageStatus.MISS
        try:
            if not self._store.quarantine(object_name(part, key)):
                return PageStatus.MISS  # evicted while it was read: not damage
        except Exception as error:  # the boundary to a backend; the page is refused either way
            self._counters.error(error)
        self._counters.mismatch(reason)
        return PageStatus.CORRUPT

    def _write(
        self, part: Part, keys: Sequence[PageKey], pages: Sequence[memoryview], deadline: float
    ) -> list[PageStatus]:
        names = [object_name(part, key) for key in keys]
        with self._headers.borrow() as headers:
            return self._ask(lambda: self._put_new(part, names, pages, headers, deadline), names)

    def _put_new(
        self,
        part: Part,
        names: Sequence[ObjectName],
        pages: Sequence[memoryview],
        headers: Sequence[memoryview],
        deadline: float,
    ) -> list[PageStatus]:
        known = self._store.contains(names, deadline=deadline)
        statuses = [PageStatus.OK] * len(names)
        new = [i for i, there in enumerate(known) if not there]
        for i in new:
            seal(part, names[i].key, pages[i], headers[i])
        blobs = [Blob(headers[i], pages[i]) for i in new]
        results = self._store.put([names[i] for i in new], blobs, deadline=deadline) if new else []
        for i, status in zip(new, results, strict=True):
            statuses[i] = status
        num_stored = sum(status is PageStatus.OK for status in results)
        self._counters.stored(num_stored * part.page_bytes, len(names) - len(new))
        return statuses

    def _ask(
        self, call: Callable[[], list[PageStatus]], names: Sequence[ObjectName]
    ) -> list[PageStatus]:
        try:
            statuses = list(call())
        except Exception as error:  # the boundary to a backend: a raising store fails the chunk
            self._counters.error(error)
            return [PageStatus.FAILED] * len(names)
        return statuses if len(statuses) == len(names) else [PageStatus.FAILED] * len(names)


def _check_pages(part: Part, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> None:
    if len(keys) != len(pages) or any(page.nbytes != part.page_bytes for page in pages):
        raise ValueError(f"need one page of {part.page_bytes} bytes for each of {len(keys)} keys")


def _leading(query: Sequence[PageKey], present: set[PageKey]) -> int:
    for i, key in enumerate(query):
        if key not in present:
            return i
    return len(query)
