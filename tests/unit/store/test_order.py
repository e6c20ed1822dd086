"""What a store gives up when there is no room: never a page before what needs it (C36)."""

from __future__ import annotations

import os
import random
import threading
import time
import tracemalloc

import pytest

from quire.store.base import STEP_NS
from quire.store.codec import object_name
from quire.store.file import FileStore
from quire.store.file.cold import FoundObjects
from quire.store.memory import MemoryStore
from quire.types import NO_PARENT, PageStatus
from unit.store.conftest import soon

OK, MISS, REJECTED, ORPHAN = (
    PageStatus.OK,
    PageStatus.MISS,
    PageStatus.REJECTED,
    PageStatus.ORPHAN,
)


@pytest.fixture(params=["file", "memory"])
def room_for(request, client, file_store, pages):
    """Makes clients of a store with room for so many pages."""

    def make(num_pages):
        size_bytes = num_pages * pages.object_bytes
        store = file_store(max_bytes=size_bytes) if request.param == "file" else None
        return client(store or MemoryStore(size_bytes))

    return make


@pytest.fixture
def sharing(client, file_store, pages):
    """Makes clients of stores on one directory with room for so many pages."""
    return lambda num_pages: client(file_store(max_bytes=num_pages * pages.object_bytes))


# ---- one process ----------------------------------------------------------------------------


def test_what_is_left_of_a_path_is_its_beginning_c36(room_for, pages):
    store = room_for(16)
    pages.put(store, *range(1, 17))
    pages.put(store, *range(101, 105))
    assert pages.usable(store, *range(1, 17)) == 12


def test_reading_a_path_keeps_its_order_c36(room_for, pages):
    store = room_for(8)
    pages.put(store, 1, 2, 3, 4)
    pages.put(store, 11, 12, 13, 14)
    pages.get(store, 1, 2, 3, 4)
    pages.put(store, 21, 22, 23, 24, 25, 26)
    assert pages.there(store, 1, 2, 3, 4, 11, 12, 13, 14) == [1, 2]


def test_asking_for_a_path_does_not_keep_what_lies_behind_a_hole_c36(room_for, pages):
    store = room_for(12)
    pages.put(store, *range(1, 9))
    pages.put(store, *range(11, 15))
    store._store.quarantine(_name(pages, 4))
    for _ in range(3):
        assert pages.usable(store, *range(1, 9)) == 3
    pages.put(store, *range(21, 26))  # one into the hole's place
    assert pages.there(store, *range(1, 15)) == [1, 2, 3, 11, 12, 13, 14]


def test_pages_that_need_no_other_are_kept_behind_a_hole(room_for, pages, deadline):
    store = room_for(4)
    pages.put(store, 2)
    pages.put(store, 11, 12, 13)
    query = [pages.keys(1, 2)]
    assert store.find(pages.part, query, deadline=deadline, each=True) == [b"\0\1"]
    pages.put(store, 21)
    assert pages.there(store, 2, 11, 12, 13) == [2, 11, 12]


def test_what_is_used_in_other_tiers_stays_c36(room_for, pages):
    store = room_for(6)
    pages.put(store, 1, 2, 3)
    pages.put(store, 11, 12, 13)
    store.touch(pages.part, pages.keys(1, 2, 3))
    pages.put(store, 21, 22, 23)
    assert pages.there(store, 1, 2, 3, 11, 12, 13) == [1, 2, 3]


def test_a_growing_path_is_never_newer_than_its_beginning_c36(room_for, pages):
    store = room_for(8)
    pages.put_path(store, 1, 2)
    pages.put_path(store, 11, 12)
    pages.put_path(store, 3, 4, after=2)  # written late, of no use without 1 and 2
    pages.put_path(store, 21, 22, 23, 24)
    assert pages.put_path(store, 31) == [OK]
    assert pages.there(store, 1, 2, 3, 4, 11, 12) == [1, 11, 12]


def test_the_end_of_a_path_is_never_made_newer_than_its_beginning_c36(room_for, pages):
    """As when the engine has the beginning in its own memory, and reads only the rest."""
    store = room_for(6)
    pages.put_path(store, 1, 2, 3, 4)
    pages.put_path(store, 11, 12)
    assert pages.usable(store, 3, 4) == 2
    assert pages.get(store, 3, 4) == [OK, OK]
    pages.put(store, 21, 22, 23)
    assert pages.there(store, 1, 2, 3, 4, 11, 12) == [1, 11, 12]


def test_the_end_of_a_path_without_its_beginning_is_not_kept_by_asking_c36(room_for, pages):
    store = room_for(6)
    pages.put_path(store, 1, 2, 3, 4)
    store._store.quarantine(_name(pages, 2))
    pages.put_path(store, 11, 12)
    pages.usable(store, 3, 4)
    pages.put(store, 21, 22, 23)
    assert pages.there(store, 1, 3, 4, 11, 12) == [1, 11, 12]


def test_a_file_written_anew_forgets_what_the_page_before_needed(sharing, pages):
    store = sharing(2)
    pages.put_path(store, 1, 2)
    pages.put_path(store, 11)  # into the file of page 2
    pages.put_path(store, 12, after=11)
    pages.get(store, 11)
    pages.put_path(store, 21)
    assert pages.there(store, 1, 2, 11, 12, 21) == [11, 21]


# ---- orphans --------------------------------------------------------------------------------


def test_a_page_without_the_one_before_it_is_not_stored_c36(room_for, pages):
    store = room_for(8)
    assert pages.put_path(store, 2, 3, after=1) == [ORPHAN, ORPHAN]
    assert pages.put_path(store, 1, 2, 3) == [OK] * 3
    assert pages.put_path(store, 4, after=3) == [OK]
    assert pages.get(store, 1, 2, 3, 4) == [OK] * 4


def test_a_page_behind_a_hole_is_an_orphan_though_it_is_there_c36(room_for, pages):
    store = room_for(8)
    pages.put_path(store, 1, 2, 3, 4)
    store._store.quarantine(_name(pages, 2))
    assert pages.put_path(store, 3, 4, 5, after=2) == [ORPHAN] * 3
    assert pages.put_path(store, 1, 2, 3, 4, 5) == [OK] * 5
    assert pages.usable(store, 1, 2, 3, 4, 5) == 5


def test_a_page_that_does_not_land_takes_those_behind_it_along(client, file_store, pages):
    """Mock: the third transfer of the group fails."""
    files = file_store()
    store = client(files)
    write = files._io.write
    files._io.write = lambda fds, buffers: [*write(fds, buffers)[:2], -5, *[12288] * (len(fds) - 3)]
    assert pages.put_path(store, 1, 2, 3, 4, 5) == [OK, OK, PageStatus.FAILED, ORPHAN, ORPHAN]
    files._io.write = write
    assert len(file_store.object_files()) == 2
    assert store._store.stats().used_bytes == 2 * pages.object_bytes


def test_going_on_with_what_nobody_used_for_long_keeps_it_c36(sharing, pages):
    """Pages 1 to 4 are next to go when somebody writes behind them."""
    store = sharing(64)
    pages.put_path(store, *range(1, 5))
    pages.put_path(store, *range(101, 161))
    pages.put_path(store, 201)  # looks for the coldest, and takes page 4
    assert pages.put_path(store, 4, after=3) == [OK]
    assert pages.put_path(store, 5, after=4) == [OK]
    pages.put_path(store, *range(301, 331))
    assert pages.usable(store, *range(1, 6)) == 5


def test_a_long_path_is_stored_right_after_the_store_was_opened(sharing, pages):
    """Each page counts as used before the one ahead, the last ones before the store was there."""
    store = sharing(3000)
    began_ns = store._store._cold.scan_start_ns
    keys = pages.keys(*range(1, 65))
    sources = [pages.full(n) for n in range(1, 65)]
    parents = [NO_PARENT, *keys[:-1]]
    statuses = store.put(
        pages.part, keys, sources, parents=parents, used_ns=began_ns + STEP_NS, deadline=soon()
    )
    assert statuses == [OK] * 64


# ---- several processes ----------------------------------------------------------------------


def test_what_one_process_reads_another_does_not_evict_c36(sharing, pages):
    writer, reader = sharing(6), sharing(6)
    pages.put(writer, 1, 2, 3)
    pages.put(writer, 4, 5, 6)
    for n in range(7, 19, 3):
        assert pages.get(reader, 1, 2, 3) == [OK] * 3
        pages.put(writer, n, n + 1, n + 2)
    assert pages.there(writer, 1, 2, 3) == [1, 2, 3]


def test_the_queue_of_one_process_serves_the_next_c36(sharing, pages):
    first = sharing(64)
    pages.put(first, *range(1, 65))
    pages.put(first, 101)  # looks for the coldest
    first.close()
    second = sharing(64)
    pages.put(second, 102, 103)
    assert pages.usable(second, *range(1, 65)) == 61


@pytest.mark.parametrize("damage", [b"", b"\0" * 32, b"\xff" * 4096])
def test_a_damaged_queue_costs_a_scan_c36(sharing, file_store, pages, damage):
    store = sharing(6)
    pages.put(store, *range(1, 7))
    pages.put(store, 11)
    (file_store.root / "state/coldest").write_bytes(damage)
    assert pages.put(store, 12, 13) in ([OK, OK], [REJECTED, OK])
    assert pages.usable(store, *range(1, 7)) >= 3


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_page_is_newer_than_what_it_needs_c36(sharing, pages, file_store, seed):
    """Conversations grow and are read by three stores on one directory, at its budget."""
    chance = random.Random(seed)
    stores = [sharing(40) for _ in range(3)]
    paths = [[1000 * i + 1] for i in range(1, 9)]
    for step in range(120):
        store, path = chance.choice(stores), chance.choice(paths)
        store.touch(pages.part, pages.keys(*path))
        if chance.random() < 0.5:
            pages.get(store, *path)
        new = [path[-1] + 1 + n for n in range(chance.randrange(1, 4))]
        if ORPHAN in pages.put_path(store, *new, after=path[-1]):
            assert ORPHAN not in pages.put_path(store, *path, *new)
        path += new
        if len(path) > 12:
            paths[paths.index(path)] = [1000 * (step + 10) + 1]
        _check_the_law(file_store, stores[0])


def _check_the_law(file_store, store):
    times = {
        int.from_bytes(bytes.fromhex(path.name[:8]), "little"): path.stat().st_mtime_ns
        for path in file_store.object_files()
    }
    for n, time_ns in times.items():
        if n % 1000 != 1:
            assert times.get(n - 1, 0) >= time_ns + STEP_NS, f"page {n}"
    assert len(times) <= 50  # a scan that runs meanwhile may miss, or see twice, what is moved


# ---- at scale -------------------------------------------------------------------------------


def test_nothing_is_held_per_object(file_store, tmp_path):
    store = file_store()
    store.close()
    for n in range(20_000):
        os.close(os.open(store._layout.object_path(_object_text(n)), os.O_WRONLY | os.O_CREAT))
    tracemalloc.start()
    try:
        store = file_store()
        used_bytes, peak_bytes = tracemalloc.get_traced_memory()
        assert store.stats().num_objects == 20_000
    finally:
        tracemalloc.stop()
    assert used_bytes < 10 * 20_000
    assert peak_bytes < 64 * 20_000 + (4 << 20)


@pytest.mark.parametrize("order", ["old first", "new first", "mixed", "equal"])
def test_what_a_scan_finds_goes_coldest_first(order):
    times = list(range(1, 5001))
    if order == "equal":
        times = [0] * 5000
    elif order == "new first":
        times.reverse()
    elif order == "mixed":
        random.Random(1).shuffle(times)
    records = _in_order(times, scan_start_ns=10**9, now_ns=10**9)
    assert [time_ns for time_ns, _ in records] == sorted(times)
    assert len({name for _, name in records}) == 5000
    assert order == "equal" or all(_object_text(t) == name for t, name in records)


def test_what_was_used_since_the_scan_began_does_not_go():
    assert [t for t, _ in _in_order(range(1, 7), scan_start_ns=3, now_ns=9)] == [1, 2]
    assert _in_order(range(3, 7), scan_start_ns=3, now_ns=9) == []


def test_a_clock_that_was_set_back_does_not_stop_eviction():
    later_ns = 3 * 10**9
    times = [later_ns + 3, later_ns + 1, later_ns + 2]
    assert [t for t, _ in _in_order(times, scan_start_ns=3, now_ns=9)] == sorted(times)


def test_pages_written_while_the_first_scan_looks_can_be_continued(client, tmp_path, pages):
    """In a new directory they are all that it finds, and none of them is cold."""
    began, go_on = threading.Event(), threading.Event()

    def wall_ns():
        now_ns = time.time_ns()
        began.set()
        go_on.wait(60)
        return now_ns

    inner = FileStore(tmp_path / "store", wall_ns=wall_ns)
    store = client(inner)
    assert began.wait(60)
    assert pages.put_path(store, *range(1, 17)) == [OK] * 16
    go_on.set()
    assert inner.wait_scanned(60)
    assert pages.put_path(store, *range(17, 21), after=16) == [OK] * 4
    inner.close()


def _in_order(times, scan_start_ns, now_ns):
    """(time, name) of what would go; objects are named by their times, or else by their number."""
    found = FoundObjects()
    for i, time_ns in enumerate(times):
        found.add(_object_text(time_ns or i), time_ns)
    return [
        (int(time_ns), bytes(key).hex() + suffix.decode())
        for piece in found.in_order(scan_start_ns, now_ns)
        for time_ns, key, suffix in piece
    ]


def _object_text(n):
    return f"{n.to_bytes(4, 'little').hex() * 8}.{'full' if n % 2 else 'window'}.0of1"


def _name(pages, n):
    return object_name(pages.part, pages.key(n))
