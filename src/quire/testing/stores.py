"""StoreSuite: what every store promises, as tests. For those who write one.

    from quire.testing.stores import StoreSuite

    class TestMine(StoreSuite):
        def open(self):
            return MyStore(...)         # the same content each time it is opened

and `pytest`. Each rule has a sentence; a store that breaks it fails there. One that needs what your
class does not say how to get (`open_small`, `place_foreign`) is skipped, and says so. Knows the
protocol (`quire.store.Store`) and no store; needs no fixture and no network.
"""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from unittest import SkipTest

import xxhash

from quire.errors import StoreError
from quire.store.base import HEADER_BYTES, MAX_OBJECTS, Blob, NewObject, ObjectName, Part, Store
from quire.store.client import PageStore
from quire.store.codec import seal
from quire.types import PageKey, PageStatus

OK, MISS, CORRUPT, ORPHAN = (
    PageStatus.OK,
    PageStatus.MISS,
    PageStatus.CORRUPT,
    PageStatus.ORPHAN,
)
_FAILED = (PageStatus.TIMEOUT, PageStatus.FAILED)


class StoreSuite:
    page_bytes = 2 * HEADER_BYTES
    is_shared = True
    """Does what one has put into it outlive its opener, and is it there for others?"""

    hangs_s = 10.0
    """A call that is over its deadline by so much hangs."""
    lands_late_s = 0.05
    """What comes after its call has ended is seen if it comes within so long."""
    secrets: Sequence[str] = ()
    """What must never be said: passwords and keys that it was opened with."""

    def open(self) -> Store:
        """The store, empty the first time in a test."""
        raise NotImplementedError

    def open_small(self, room_bytes: int) -> Store | None:
        """One that keeps no more than so many bytes; None: it has no budget of its own."""
        return None

    def place_foreign(self) -> Callable[[], bool] | None:
        """Puts something of somebody else's where the store keeps its objects. Returns what says
        whether it is still there; None: nobody else can reach that place."""
        return None

    # ---- what goes in comes out -----------------------------------------------------------------

    def test_what_is_put_comes_back_byte_for_byte(self) -> None:
        with self._opened() as store:
            names = [name(n) for n in range(MAX_OBJECTS)]
            assert self._put(store, *range(MAX_OBJECTS)) == [OK] * MAX_OBJECTS
            assert store.contains(names, deadline=soon()) == [True] * MAX_OBJECTS
            assert self._get(store, *reversed(range(MAX_OBJECTS))) == [OK] * MAX_OBJECTS

    def test_what_was_never_put_is_a_miss_and_the_others_come(self) -> None:
        with self._opened() as store:
            self._put(store, 1, 3)
            assert store.contains([name(n) for n in (1, 2, 3)], deadline=soon()) == [
                True,
                False,
                True,
            ]
            assert self._get(store, 1, 2, 3) == [OK, MISS, OK]

    def test_names_that_differ_in_one_part_only_are_different_objects(self) -> None:
        with self._opened() as store:
            self._put(store, 1)
            others = [
                name(1)._replace(component="window"),
                name(1)._replace(shard=1, num_shards=2),
                name(1)._replace(num_shards=2),
            ]
            assert store.contains(others, deadline=soon()) == [False] * 3

    def test_putting_what_is_there_is_fine(self) -> None:
        with self._opened() as store:
            self._put(store, 1)
            assert self._put(store, 1) == [OK]
            assert self._get(store, 1) == [OK]

    def test_nothing_at_all_may_be_asked_for(self) -> None:
        with self._opened() as store:
            assert store.contains([], deadline=soon()) == []
            assert store.get([], [], deadline=soon()) == []
            assert store.put([], deadline=soon()) == []
            store.touch([], used_ns=time.time_ns())

    def test_others_and_those_who_come_later_find_it(self) -> None:
        if not self.is_shared:
            raise SkipTest("what is in this store is there for one opener only")
        with self._opened() as first, self._opened() as second:
            self._put(first, 1)
            assert self._get(second, 1) == [OK]
        with self._opened() as third:
            assert self._get(third, 1) == [OK]

    # ---- never a part, never a mixture ----------------------------------------------------------

    def test_an_object_of_another_size_is_damaged_and_its_neighbours_are_not(self) -> None:
        with self._opened() as store:
            short = self._new(2, None, page_bytes=HEADER_BYTES)
            assert store.put([short], deadline=soon()) == [OK]
            self._put(store, 1, 3)
            statuses = self._get(store, 1, 2, 3)
            assert statuses[0] is statuses[2] is OK
            assert statuses[1] in (CORRUPT, MISS)

    def test_of_a_shorter_object_the_bytes_that_there_are_come(self) -> None:
        """It may be a packed page."""
        with self._opened() as store:
            short = self._new(2, None, page_bytes=HEADER_BYTES)
            store.put([short], deadline=soon())
            into = self._blob()
            assert store.get([name(2)], [into], deadline=soon()) == [CORRUPT]
            assert into.header == short.blob.header
            assert into.payload[:HEADER_BYTES] == short.blob.payload

    def test_of_a_longer_object_the_header_comes(self) -> None:
        """It may be another model's, or a later version's, and is then left alone."""
        with self._opened() as store:
            long = self._new(2, None, page_bytes=self.page_bytes + HEADER_BYTES)
            store.put([long], deadline=soon())
            into = self._blob()
            assert store.get([name(2)], [into], deadline=soon()) == [CORRUPT]
            assert into.header == long.blob.header

    def test_of_writers_of_one_name_at_once_one_is_seen_whole(self) -> None:
        """All of them write different bytes, as no two engines would: so that a mixture shows."""
        with self._opened() as store:
            wrong: list[str] = []
            ended = threading.Event()

            def write(fill: int) -> None:
                payload = memoryview(bytearray([fill]) * self.page_bytes)
                header = memoryview(bytearray([fill]) * HEADER_BYTES)
                new = NewObject(name(7), Blob(header, payload), None, time.time_ns())
                for _ in range(8):
                    store.put([new], deadline=soon())

            def look() -> None:
                blob = self._blob()
                if store.get([name(7)], [blob], deadline=soon()) == [OK]:
                    whole = bytes(blob.header) + bytes(blob.payload)
                    if whole != whole[:1] * len(whole):
                        wrong.append("a mixture of two objects was read")

            def read() -> None:
                while not ended.is_set():
                    look()

            reader = threading.Thread(target=read)
            writers = [threading.Thread(target=write, args=(fill,)) for fill in (1, 2, 3)]
            for thread in (reader, *writers):
                thread.start()
            for thread in writers:
                thread.join()
            ended.set()
            reader.join()
            look()
            assert not wrong

    # ---- whose it is ----------------------------------------------------------------------------

    def test_pages_of_a_later_version_or_another_model_are_misses_and_stay(self) -> None:
        """Read as an engine does, twice; they are there for their owners as they were. Theirs may
        be larger, or smaller, as packed ones are."""
        part = Part("full", 0, 1, b"m" * 32, self.page_bytes)
        sizes = (self.page_bytes, HEADER_BYTES, self.page_bytes + HEADER_BYTES)
        with closing(self.open()) as store:
            theirs = [self._new(n, None, page_bytes=size) for n, size in enumerate(sizes * 2)]
            for n, new in enumerate(theirs):
                size, header = new.blob.payload.nbytes, new.blob.header
                fingerprint = part.fingerprint if n < len(sizes) else b"o" * 32
                owner = replace(part, fingerprint=fingerprint, page_bytes=size)
                seal(owner, new.name.key, new.blob.payload, header)
                if n < len(sizes):
                    _make_later(header)
            assert store.put(theirs, deadline=soon()) == [OK] * len(theirs)
            pages, keys = PageStore(store, clock=time.monotonic), [new.name.key for new in theirs]
            for _ in range(2):
                into = [self._blob().payload for _ in keys]
                assert pages.get(part, keys, into, deadline=soon()) == [MISS] * len(keys)
            for new in theirs:
                there = self._blob(new.blob.payload.nbytes)
                assert store.get([new.name], [there], deadline=soon()) == [OK]
                assert there == new.blob

    # ---- paths ----------------------------------------------------------------------------------

    def test_a_page_without_the_one_it_needs_is_not_kept(self) -> None:
        with self._opened() as store:
            assert self._put_path(store, 2, 3, after=1) == [ORPHAN, ORPHAN]
            assert store.contains([name(2), name(3)], deadline=soon()) == [False, False]

    def test_a_page_may_come_with_the_one_it_needs(self) -> None:
        with self._opened() as store:
            assert self._put_path(store, 1, 2, 3) == [OK] * 3
            assert self._put_path(store, 4, after=3) == [OK]

    def test_using_a_path_changes_nothing_but_its_time(self) -> None:
        with self._opened() as store:
            self._put_path(store, 1, 2)
            store.touch([name(1), name(2), name(9)], used_ns=time.time_ns())
            store.touch([name(2), name(9)], used_ns=time.time_ns(), each=True)
            assert self._get(store, 1, 2, 9) == [OK, OK, MISS]

    # ---- time -----------------------------------------------------------------------------------

    def test_a_call_whose_time_is_over_ends(self) -> None:
        """With what it could do, or with a failure; and the store works afterwards."""
        with self._opened() as store:
            self._put(store, 1)
            began, over = time.monotonic(), time.monotonic() - 1
            got = store.get([name(1)], [self._blob()], deadline=over)
            put = store.put([self._new(2, None)], deadline=over)
            assert got[0] in (OK, *_FAILED)
            assert put[0] in (OK, *_FAILED)
            assert time.monotonic() - began < self.hangs_s
            assert self._get(store, 1) == [OK]

    def test_nothing_is_written_into_a_page_when_the_call_has_ended(self) -> None:
        """However it ended: the page is somebody else's by then."""
        with self._opened() as store:
            numbers = range(MAX_OBJECTS)
            self._put(store, *numbers)
            into = [self._blob() for _ in numbers]
            for left_s in (60.0, 0.01, 0.001, 0.0):
                with suppress(OSError, StoreError):
                    deadline = time.monotonic() + left_s
                    store.get([name(n) for n in numbers], into, deadline=deadline)
                for blob in into:
                    blob.payload[:] = b"\xee" * self.page_bytes
                time.sleep(self.lands_late_s)
                assert all(set(blob.payload) == {0xEE} for blob in into)

    def test_closing_it_ends_the_calls_that_are_under_way(self) -> None:
        """With whatever they have, or by raising; and nobody who calls afterwards waits."""
        store, enough = self.open(), threading.Event()
        self._put(store, 1)

        def call() -> None:
            with suppress(OSError, StoreError):
                store.get([name(1)], [self._blob()], deadline=soon())
                store.put([self._new(1, None)], deadline=soon())

        def work() -> None:
            while not enough.is_set():
                call()
            call()

        callers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for caller in callers:
            caller.start()
        store.close()
        enough.set()
        for caller in callers:
            caller.join(self.hangs_s)
        assert not any(caller.is_alive() for caller in callers), "a call hangs"

    # ---- room, and what is said -----------------------------------------------------------------

    def test_it_keeps_to_its_budget(self) -> None:
        size = HEADER_BYTES + self.page_bytes
        store = self.open_small(8 * size)
        if store is None:
            raise SkipTest("no open_small: this store keeps no budget that could be set here")
        with closing(store):
            statuses = [self._put(store, n)[0] for n in range(24)]
            assert set(statuses) <= {OK, PageStatus.REJECTED}
            assert statuses[0] is OK
            assert sum(item.size_bytes for item in store.scan()) <= 9 * size
            self._get(store, *range(MAX_OBJECTS))

    def test_using_it_takes_no_more_and_more_memory(self) -> None:
        with self._opened() as store:

            def use(rounds: int) -> int:
                for _ in range(rounds):
                    self._put(store, *range(8))
                    self._get(store, *range(8))
                gc.collect()
                return tracemalloc.get_traced_memory()[0]

            tracemalloc.start()
            try:
                before, rounds = use(2), 8
                grown = use(rounds) - before
            finally:
                tracemalloc.stop()
            assert grown < rounds * 8 * self.page_bytes / 4, f"{grown} bytes are kept"

    def test_nothing_that_it_says_tells_a_payload_or_a_secret(self) -> None:
        new, said = self._new(1, None), []
        new.blob.payload[:] = b"Paylo4d!" * (self.page_bytes // 8)
        store = self.open()
        with closing(store):
            store.put([new], deadline=soon())
            said.append(f"{store!r} {store.stats()!r} {list(store.scan())!r}")
        calls: list[Callable[[], object]] = [
            lambda: store.put([new], deadline=soon()),
            lambda: store.get([name(1)], [self._blob()], deadline=soon()),
            lambda: store.contains([name(1)], deadline=soon()),
            store.clear,
        ]
        for call in calls:
            try:
                call()
            except Exception as error:  # whatever a closed store raises
                said.append(f"{error!r} {error}")
        for word in ("Paylo4d", b"Paylo4d".hex(), *self.secrets):
            assert not any(word in text for text in said), f"{word} is said"

    # ---- for people -----------------------------------------------------------------------------

    def test_what_is_damaged_is_taken_out_once(self) -> None:
        with self._opened() as store:
            self._put(store, 1, 2)
            assert store.quarantine(name(1))
            assert not store.quarantine(name(1))
            assert self._get(store, 1, 2) == [MISS, OK]
            assert self._put(store, 1) == [OK]
            assert self._get(store, 1) == [OK]

    def test_a_scan_finds_every_object_once_by_its_name_and_size(self) -> None:
        with self._opened() as store:
            self._put(store, 1, 2, 3)
            store.quarantine(name(2))
            found = sorted((item.name, item.size_bytes) for item in store.scan())
            assert found == [(name(n), HEADER_BYTES + self.page_bytes) for n in (1, 3)]

    def test_what_was_cleared_is_gone_and_it_can_be_filled_again(self) -> None:
        with self._opened() as store:
            self._put_path(store, 1, 2, 3)
            store.clear(wait=True)
            assert self._get(store, 1, 2, 3) == [MISS] * 3
            assert list(store.scan()) == []
            assert self._put_path(store, 1, 2) == [OK, OK]

    def test_what_others_keep_there_is_left_alone(self) -> None:
        is_there = self.place_foreign()
        if is_there is None:
            raise SkipTest("no place_foreign: nobody else can reach the place of this store")
        with self._opened() as store:
            self._put(store, 1, 2)
            assert len(list(store.scan())) == 2
            store.clear(wait=True)
            assert is_there()

    def test_figures_are_told(self) -> None:
        with self._opened() as store:
            self._put(store, 1)
            stats = store.stats()
            assert stats.used_bytes is None or stats.used_bytes >= self.page_bytes
            assert stats.num_objects in (None, 1)
            assert not stats.read_only

    # ---- many at once ---------------------------------------------------------------------------

    def test_threads_do_not_get_each_others_pages(self) -> None:
        with self._opened() as store:
            wrong: list[int] = []

            def work(first: int) -> None:
                for n in range(first, first + 16):
                    try:
                        assert self._put(store, n) == [OK]
                        assert self._get(store, n) == [OK]
                    except AssertionError:
                        wrong.append(n)

            threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong

    # ---- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[Store]:
        with closing(self.open()) as store:
            yield store

    def _blob(self, page_bytes: int | None = None) -> Blob:
        size = self.page_bytes if page_bytes is None else page_bytes
        return Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(size)))

    def _new(self, n: int, parent: int | None, page_bytes: int | None = None) -> NewObject:
        blob = self._blob(page_bytes)
        blob.header[:] = n.to_bytes(4, "big") * (HEADER_BYTES // 4)
        blob.payload[:] = (n + 1).to_bytes(4, "big") * (blob.payload.nbytes // 4)
        needs = None if parent is None else name(parent)
        return NewObject(name(n), blob, needs, time.time_ns())

    def _put(self, store: Store, *numbers: int) -> Sequence[PageStatus]:
        return store.put([self._new(n, None) for n in numbers], deadline=soon())

    def _put_path(self, store: Store, *numbers: int, after: int | None = None) -> list[PageStatus]:
        parents = [after, *numbers[:-1]]
        news = [self._new(n, parent) for n, parent in zip(numbers, parents, strict=True)]
        return store.put(news, deadline=soon())

    def _get(self, store: Store, *numbers: int) -> list[PageStatus]:
        """Whatever is OK must be right."""
        into = [self._blob() for _ in numbers]
        statuses = store.get([name(n) for n in numbers], into, deadline=soon())
        for n, status, blob in zip(numbers, statuses, into, strict=True):
            right = self._new(n, None).blob
            if status is OK:
                assert blob.header == right.header, f"object {n} has another's header"
                assert blob.payload == right.payload, f"object {n} has another's bytes"
        return statuses


def _make_later(header: memoryview) -> None:
    """A sealed header of a version that nobody has yet: where these are, and what seals them, stays
    in every version (see codec.py)."""
    header[8:12] = (1000).to_bytes(4, "little")
    header[-16:] = xxhash.xxh3_128_digest(header[:-16])


def name(n: int) -> ObjectName:
    return ObjectName(PageKey(n.to_bytes(4, "big") * 8), "full", 0, 1)


def soon() -> float:
    return time.monotonic() + 60
