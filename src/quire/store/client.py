"""`PageStore`: what a worker uses. Pages in, pages out, every one sealed and verified.

Sits on any `Store` and trusts none: it seals what goes in, verifies what comes out, turns every
fault into a per-page status with a counted reason, and stops asking a store that does not answer.
Knows nothing of tiers, files or threads: it works on its caller's.

A call returns only when the store has let go of every page handed to it, because the pages are
read and written in place. Deadlines are therefore checked between chunks and by the store between
objects; a store stuck inside one object holds that call, and other calls are declined meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import TypeVar

from quire.store.account import StoreHealth
from quire.store.base import (
    HEADER_BYTES,
    STEP_NS,
    Blob,
    Budgeted,
    Counting,
    Landings,
    Making,
    NewObject,
    ObjectName,
    Part,
    Store,
    pages_per_call,
)
from quire.store.breaker import Breaker
from quire.store.buffers import Headers, Room
from quire.store.codec import (
    Mismatch,
    check,
    check_header,
    check_packed,
    object_name,
    seal,
    unpack_in_place,
)
from quire.store.counters import StoreCounters, by_outcome
from quire.store.disowned import Disowned
from quire.store.packing import Packer
from quire.store.paths import look_up, touch_found, up_to_hole
from quire.store.store_calls import StoreCalls
from quire.types import NO_PARENT, Owner, PageKey, PageStatus

Answer = TypeVar("Answer")

_OK = PageStatus.OK


class PageStore:
    """Thread-safe. `deadline`s are absolute, on `clock`; `used_ns` is Unix time, None: now."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        wall_ns: Callable[[], int] = time.time_ns,
        breaker: Breaker | None = None,
        packer: Packer | None = None,
    ) -> None:
        """`packer`: for pages that are written; those that are read say themselves how."""
        self._store = store
        self._making = store if isinstance(store, Making) else None
        self._packer = packer
        self._room = Room()
        self._clock = clock
        self._wall_ns = wall_ns
        self._headers = Headers()
        self._counters = StoreCounters(
            "read_bytes", "written_bytes", "skipped_pages", "probed_pages", "probe_hits"
        )
        self._calls = StoreCalls(clock, breaker or Breaker(clock), self._counters)
        self._disowned = Disowned(self._take_out)

    def find(
        self,
        part: Part,
        queries: Sequence[Sequence[PageKey]],
        *,
        deadline: float,
        each: bool = False,
        uses: bool = True,
    ) -> list[bytes]:
        """See Pages."""
        # Prompts of one group share their beginning: each page is asked for once.
        keys = list(dict.fromkeys(key for query in queries for key in query))
        names = [object_name(part, key) for key in keys]
        present: set[PageKey] = set()
        if keys and not self._calls.is_late(deadline) and self._calls.may_ask():
            contains = partial(self._store.contains, names, deadline=deadline)
            began_s = self._clock()
            with self._calls.call(deadline):
                there = self._ask(contains, len(keys))
            self._calls.judge([there if isinstance(there, PageStatus) else _OK], began_s, deadline)
            if not isinstance(there, PageStatus):
                present.update(compress(keys, there))
                if self._disowned:
                    there = [name not in self._disowned for name in names]
                    present.intersection_update(compress(keys, there))
        found = [bytes(key in present for key in query) for query in queries]
        if not each:
            found = [up_to_hole(there) for there in found]
        if uses:
            touch_found(self, part, queries, found, each=each)
        probed = {"probed_pages": sum(map(len, found)), "probe_hits": sum(map(sum, found))}
        self._counters.add(probed)
        return found

    def pace(self, part: Part, keys: Sequence[PageKey]) -> float:
        """One store: they take as long as ever."""
        return 1.0

    def touch(
        self,
        part: Part,
        keys: Sequence[PageKey],
        *,
        used_ns: int | None = None,
        each: bool = False,
    ) -> None:
        """The pages were used, here or in another tier: see Store.touch. Nobody waits for it, and a
        store that does not answer is left alone."""
        if not keys or self._calls.is_closed or not self._calls.store_answers:
            return
        try:
            names = [object_name(part, key) for key in keys]
            self._store.touch(names, used_ns=used_ns or self._wall_ns(), each=each)
        except Exception as error:  # the boundary to a backend: what is not touched grows cold
            self._counters.error(error)

    def disown(self, part: Part, keys: Sequence[PageKey]) -> Callable[[], None]:
        """See Pages. One that the store does not let go of stays a miss here."""
        names = [object_name(part, key) for key in keys]
        self._disowned.add(names)
        return partial(self._disowned.take_out, names)

    def writing(self, part: Part, keys: Sequence[PageKey]) -> AbstractContextManager[None]:
        """For whoever is given pages to put later: what is disowned meanwhile is not written, or
        is a miss until it has been taken out."""
        return self._disowned.writing([object_name(part, key) for key in keys])

    def get(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
    ) -> list[PageStatus]:
        """Read each page in place. Only an OK page's bytes mean anything. That pages were used is
        for the caller to say, once all of a path have come."""
        _check_pages(part, keys, pages)

        def read(first: int, end: int) -> list[PageStatus]:
            return self._read(part, keys[first:end], pages[first:end], deadline)

        statuses = self._run(part, len(keys), read, deadline)
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
        """Publish each page. One the store has already is OK, and is neither hashed nor sent, if
        what it needs is there too.

        `parents`: per page the one before it, or NO_PARENT; without it the page is an ORPHAN.
        Empty: no page needs another. `owners`: per page whose it is; empty: nobody's.
        """
        _check_pages(part, keys, pages)
        began_ns = used_ns or self._wall_ns()
        names = [object_name(part, key) for key in keys]
        own = dict(zip(keys, names, strict=True))
        needed = [
            None if parent == NO_PARENT else own.get(parent) or object_name(part, parent)
            for parent in parents or [NO_PARENT] * len(keys)
        ]
        whose = owners or [None] * len(keys)

        def write(first: int, end: int) -> list[PageStatus]:
            blobs = self._headers.blobs(pages[first:end])
            objects = [
                NewObject(
                    names[i],
                    partial(self._sealed, part, keys[i], blob, i - first),
                    needed[i],
                    began_ns - i * STEP_NS,
                    whose[i],
                )
                for i, blob in enumerate(blobs, first)
            ]
            put = partial(self._put_new, part, objects, deadline)
            return _each(self._ask(put, len(objects)), len(objects))

        with self._disowned.writing(names):
            statuses = self._run(part, len(keys), write, deadline)
        self._counters.add(by_outcome("written", statuses))
        return statuses

    def clear(self) -> None:
        """Every object of the store, of every model, is a miss from here on. Raises OSError."""
        self._store.clear()

    def counters(self) -> dict[str, int]:
        """What this client has counted, and the store itself. Never asks a server: safe where
        nothing may block."""
        own = self._store.counts() if isinstance(self._store, Counting) else {}
        return self._counters.snapshot() | own | {"breaker_opened": self._calls.times_opened}

    def health(self) -> list[StoreHealth]:
        """Of the only one."""
        budget = self._store.budget() if isinstance(self._store, Budgeted) else None
        return [StoreHealth(self._calls.store_answers, budget)]

    def close(self, timeout_s: float = 5.0) -> None:
        """Decline new calls, give running ones `timeout_s` to finish, close the store."""
        if self._calls.close(timeout_s):
            self._store.close()

    # ---- one call ---------------------------------------------------------------------------

    def _run(
        self,
        part: Part,
        num_pages: int,
        work: Callable[[int, int], list[PageStatus]],
        deadline: float,
    ) -> list[PageStatus]:
        """Statuses from `work(first, end)`, minding breaker, stalls and deadline."""
        if not num_pages:
            return []
        if not self._calls.may_ask():
            return [PageStatus.REJECTED] * num_pages
        size = pages_per_call(part.page_bytes)
        statuses: list[PageStatus] = []
        began_s = self._clock()
        with self._calls.call(deadline):
            while len(statuses) < num_pages and self._clock() < deadline:
                statuses += work(len(statuses), min(len(statuses) + size, num_pages))
        self._calls.judge(statuses, began_s, deadline)
        return statuses + [PageStatus.TIMEOUT] * (num_pages - len(statuses))

    # ---- one chunk --------------------------------------------------------------------------

    def _read(
        self, part: Part, keys: Sequence[PageKey], pages: Sequence[memoryview], deadline: float
    ) -> list[PageStatus]:
        names = [object_name(part, key) for key in keys]
        barred = [i for i, name in enumerate(names) if name in self._disowned]
        blobs = self._headers.blobs(pages)
        for blob in blobs:
            blob.header[:8] = bytes(8)  # what an earlier page left there must not pass for new
        right: set[int] = set()

        def landed(i: int) -> None:
            if check(part, keys[i], *blobs[i]) is None:
                right.add(i)

        get = partial(self._store.get, names, Landings(blobs, landed), deadline=deadline)
        statuses = _each(self._ask(get, len(names)), len(names))
        for i, status in enumerate(statuses):
            if status is PageStatus.CORRUPT or (status is _OK and i not in right):
                statuses[i] = self._verify(part, keys[i], blobs[i], status, deadline)
        for i in barred:
            statuses[i] = PageStatus.MISS
        return statuses

    def _verify(
        self, part: Part, key: PageKey, blob: Blob, status: PageStatus, deadline: float
    ) -> PageStatus:
        """What is damaged is set aside, if there is time; else by whoever reads it next."""
        reason: Mismatch | None
        if status is PageStatus.OK:
            reason = check(part, key, blob.header, blob.payload)
        elif unpack_in_place(part, key, blob.header, blob.payload):
            reason = check_packed(part, key, blob.header, blob.payload)
        else:  # the object was too short or too long; its header may tell whose it is
            reason = check_header(part, key, blob.header)
            reason = reason if reason and reason.is_foreign else Mismatch.LENGTH
        if reason is None:
            return PageStatus.OK
        if reason.is_foreign:
            self._counters.count(f"mismatch:{reason.value}")
            return PageStatus.MISS
        if self._clock() >= deadline:
            return PageStatus.MISS
        try:
            if not self._store.quarantine(object_name(part, key)):
                return PageStatus.MISS  # evicted while it was read: not damage
        except Exception as error:  # the boundary to a backend; the page is refused either way
            self._counters.error(error)
        self._counters.count(f"mismatch:{reason.value}")
        return PageStatus.CORRUPT

    def _take_out(self, name: ObjectName) -> bool:
        """See Disowned."""
        if self._calls.is_closed:
            return False
        try:
            gone = self._store.quarantine(name)
        except Exception as error:  # the boundary to a backend
            self._counters.error(error)
            return False
        self._counters.add({"disowned_pages": int(gone)})
        return True

    def _put_new(
        self, part: Part, objects: Sequence[NewObject], deadline: float
    ) -> list[PageStatus]:
        if self._disowned:
            self._disowned.take_out([item.name for item in objects])
        contains = partial(self._store.contains, deadline=deadline)
        known = look_up(objects, contains, self._making)
        if self._disowned:
            for i, item in enumerate(objects):
                if item.name in self._disowned:  # not to be written, or not let go of
                    stale = self._disowned.is_stale(item.name)
                    known[i] = PageStatus.REJECTED if stale else PageStatus.FAILED
        kept = [item.name for item, state in zip(objects, known, strict=True) if state is _OK]
        if kept:
            independent = all(item.parent is None for item in objects)
            self._store.touch(kept, used_ns=objects[0].used_ns, each=independent)
        places = [i for i, state in enumerate(known) if state is None]
        new = [objects[i] for i in places]
        results = self._store.put(new, deadline=deadline) if new else []
        num_bytes = results.count(_OK) * part.page_bytes
        self._counters.add({"written_bytes": num_bytes, "skipped_pages": len(kept)})
        if self._packer is not None:
            taken = compress(new, [result is _OK for result in results])
            self._counters.add({"packed_bytes": sum(item.blob.payload.nbytes for item in taken)})
        for i, status in zip(places, results, strict=True):
            known[i] = status
        return [status for status in known if status is not None]

    def _sealed(self, part: Part, key: PageKey, blob: Blob, at: int) -> Blob:
        """As it goes to the store, the `at`-th of a call: packed, if that makes it a block smaller
        at least."""
        header, page = blob
        packing = None
        if self._packer is not None and page.nbytes > HEADER_BYTES:
            room = self._room.of(at, page.nbytes)
            packing = self._packer.pack(page, room[: page.nbytes - HEADER_BYTES])
        seal(part, key, page, header, packing)
        if packing is None:
            return blob
        end = -(-packing.packed_bytes // HEADER_BYTES) * HEADER_BYTES
        room[packing.packed_bytes : end] = bytes(end - packing.packed_bytes)
        return Blob(header, room[:end])

    def _ask(self, call: Callable[[], list[Answer]], count: int) -> list[Answer] | PageStatus:
        """An answer per page, or what has become of all of them."""
        try:
            answers = list(call())
        except Exception as error:  # the boundary to a backend: see base.py
            self._counters.error(error)
            late = isinstance(error, TimeoutError)
            return PageStatus.TIMEOUT if late else PageStatus.FAILED
        return answers if len(answers) == count else PageStatus.FAILED


def _each(answers: list[PageStatus] | PageStatus, count: int) -> list[PageStatus]:
    return [answers] * count if isinstance(answers, PageStatus) else answers


def _check_pages(part: Part, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> None:
    if len(keys) != len(pages) or any(page.nbytes != part.page_bytes for page in pages):
        raise ValueError(f"need one page of {part.page_bytes} bytes for each of {len(keys)} keys")
