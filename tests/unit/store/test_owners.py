"""Who has its share of a store costs nobody else a page, and has what it wrote last."""

from __future__ import annotations

import os
import time

import pytest

from quire.store.codec import object_name
from quire.store.file import FileStore
from quire.store.memory import MemoryStore
from quire.types import Owner, PageStatus

OK, REJECTED = PageStatus.OK, PageStatus.REJECTED
ROOM = 64
GREEDY, MODEST = Owner("aa", 0.25), Owner("bb", 0.25)
QUOTA = ROOM // 4
HOUR_NS = 3600 * 10**9


@pytest.fixture(params=["file", "memory"])
def store(request, client, file_store, pages):
    size_bytes = ROOM * pages.object_bytes
    if request.param == "file":
        return client(file_store(max_bytes=size_bytes))
    return client(MemoryStore(size_bytes))


def documents(first: int, count: int, size: int = 4) -> list[range]:
    """Numbers of pages of paths."""
    return [range(first + 100 * i, first + 100 * i + size) for i in range(count)]


def num_there(pages, store, paths) -> int:
    return sum(len(pages.there(store, *path)) for path in paths)


def num_owned(store: FileStore, owner: Owner, pages) -> int:
    """Pages that its list names."""
    free_bytes = store._owners.room(owner, ROOM * pages.object_bytes, bound_ns=0)
    return QUOTA - free_bytes // pages.object_bytes


def test_who_has_its_share_costs_nobody_a_page(store, pages):
    """The store is full of others' pages, all of them colder than what comes."""
    modest = documents(10_000, QUOTA // 4)
    nobodys = documents(20_000, (ROOM - 2 * QUOTA) // 4)
    for path in modest:
        pages.put_path(store, *path, owner=MODEST)
    for path in nobodys:
        pages.put_path(store, *path)
    greedy = documents(100_000, 60)
    for i, path in enumerate(greedy):
        assert pages.put_path(store, *path, owner=GREEDY) == [OK] * 4
        assert num_there(pages, store, greedy[: i + 1]) <= QUOTA
    assert num_there(pages, store, modest) == QUOTA
    assert num_there(pages, store, nobodys) == ROOM - 2 * QUOTA
    assert pages.usable(store, *greedy[-1]) == 4, "it has what it wrote last"


def test_what_is_left_of_its_own_is_whole(store, pages):
    """Ends of paths go before what they need, and what is used last stays."""
    paths = documents(1, 3, size=5)
    # Long ago: a directory does not note use of what was used a moment before.
    long_ago_ns = time.time_ns() - HOUR_NS
    for i, path in enumerate(paths):
        pages.put_path(store, *path, owner=GREEDY, used_ns=long_ago_ns + i * HOUR_NS // 10)
    pages.get(store, *paths[0])
    pages.put_path(store, *range(9001, 9004), owner=GREEDY)
    for path in (*paths, range(9001, 9004)):
        assert pages.usable(store, *path) == len(pages.there(store, *path))
    assert pages.usable(store, *paths[0]) == 5
    assert pages.usable(store, *range(9001, 9004)) == 3
    assert pages.usable(store, *paths[1]) < 5


def test_of_a_path_longer_than_its_share_it_has_the_beginning(store, pages):
    long = range(1, QUOTA + 9)
    statuses = pages.put_path(store, *long, owner=GREEDY)
    num_taken = statuses.count(OK)
    assert QUOTA // 2 < num_taken <= QUOTA
    assert set(statuses[num_taken:]) <= {REJECTED, PageStatus.ORPHAN}
    assert pages.usable(store, *long) == num_taken == len(pages.there(store, *long))


def test_who_has_no_owner_has_no_quota(store, pages):
    for path in documents(1, ROOM // 4):
        pages.put_path(store, *path)
    assert num_there(pages, store, documents(1, ROOM // 4)) == ROOM


def test_what_others_took_from_it_does_not_count(store, pages):
    """Its pages went for want of room, or were cleared: it may have as many again."""
    own = documents(1, QUOTA // 4)
    for path in own:
        pages.put_path(store, *path, owner=GREEDY)
    for path in documents(50_000, ROOM // 4):
        pages.put_path(store, *path)
    assert num_there(pages, store, own) == 0
    again = documents(100_000, QUOTA // 4)
    for path in again:
        assert pages.put_path(store, *path, owner=GREEDY) == [OK] * 4
    assert num_there(pages, store, again) == QUOTA
    store._store.clear(wait=True)
    for path in own:
        assert pages.put_path(store, *path, owner=GREEDY) == [OK] * 4
    assert num_there(pages, store, own) == QUOTA


def test_processes_on_one_directory_account_together(client, file_store, pages):
    one, other = (client(file_store(max_bytes=ROOM * pages.object_bytes)) for _ in range(2))
    paths = documents(1, 24)
    for i, path in enumerate(paths):
        assert pages.put_path((one, other)[i % 2], *path, owner=GREEDY) == [OK] * 4
    assert QUOTA // 2 < num_there(pages, one, paths) <= QUOTA


def test_lists_of_owners_who_have_nothing_left_go(client, file_store, pages):
    store = file_store(max_bytes=ROOM * pages.object_bytes)
    pages.put_path(client(store), 1, 2, owner=GREEDY)
    pages.put_path(client(store), 11, 12, owner=MODEST)
    folder = file_store.root / "state/owners"
    for n in (1, 2):
        os.unlink(store._layout.object_path(object_name(pages.part, pages.key(n)).text))
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    store._owners.sweep(before_ns=10**12)
    assert [file.name for file in folder.iterdir()] == [MODEST.name]
    assert num_owned(store, MODEST, pages) == 2


def test_a_list_torn_by_a_crash_is_read_as_far_as_it_goes(file_store, client, pages):
    store: FileStore = file_store(max_bytes=ROOM * pages.object_bytes)
    pages.put_path(client(store), 1, 2, 3, owner=GREEDY)
    file = file_store.root / "state/owners" / GREEDY.name
    os.truncate(file, file.stat().st_size - 7)
    assert num_owned(store, GREEDY, pages) == 2
    pages.put_path(client(store), 11, 12, owner=GREEDY)
    assert num_owned(store, GREEDY, pages) == 4
    outside = file_store.root.parent / "outside"
    outside.write_text("somebody else's")
    with file.open("ab") as appended:
        for text in (b"../../outside", b"\xff\xfe", str(outside).encode()):
            appended.write((1 << 20).to_bytes(8, "little") + text.ljust(116, b"\0"))
    assert num_owned(store, GREEDY, pages) == 4
    for path in documents(100, 8):
        pages.put_path(client(store), *path, owner=GREEDY)
    assert outside.exists()
    file.write_bytes(b"")
    assert num_owned(store, GREEDY, pages) == 0
