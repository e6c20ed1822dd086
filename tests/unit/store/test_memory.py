from __future__ import annotations

import pytest

from quire.store.memory import MemoryStore
from quire.store.url import open_store
from quire.types import PageStatus

OK, MISS, REJECTED = PageStatus.OK, PageStatus.MISS, PageStatus.REJECTED


@pytest.fixture
def room_for_three(pages):
    return MemoryStore(3 * pages.object_bytes)


def present(store, pages, deadline, *numbers):
    queries = [[key] for key in pages.keys(*numbers)]
    return list(b"".join(store.find(pages.part, queries, deadline=deadline)))


def test_least_recently_used_goes_first(client, pages, deadline, room_for_three):
    store = client(room_for_three)
    pages.put(store, 3, 2, 1, deadline=deadline)
    pages.get(store, 1, deadline=deadline)
    pages.put(store, 4, deadline=deadline)
    assert present(store, pages, deadline, 1, 2, 3, 4) == [1, 0, 1, 1]
    assert store._store.stats().evicted_objects == 1


def test_budget_is_kept(client, pages, deadline, room_for_three):
    store = client(room_for_three)
    assert pages.put(store, *range(20), deadline=deadline) == [OK] * 20
    assert store._store.stats().used_bytes == 3 * pages.object_bytes


def test_page_larger_than_the_store_is_rejected(client, pages, deadline):
    assert pages.put(client(MemoryStore(100)), 1, deadline=deadline) == [REJECTED]


def test_clear_empties(client, pages, deadline, room_for_three):
    store = client(room_for_three)
    pages.put(store, 1, 2, deadline=deadline)
    assert [item.size_bytes for item in room_for_three.scan()] == [pages.object_bytes] * 2
    store.clear()
    assert list(room_for_three.scan()) == []
    assert room_for_three.stats().used_bytes == 0


@pytest.mark.parametrize(("url", "kept"), [("memory://?max=1GiB", 0), ("memory://kept", 3)])
def test_what_only_its_opener_could_find_is_given_back_when_it_is_closed(
    client, pages, deadline, url, kept
):
    """At once: what an engine has made by its start is not looked through for garbage, its store
    neither, so that one that was attached at the start and replaced had kept its pages for ever."""
    opened = open_store(url)
    store = client(opened)
    pages.put(store, 1, 2, 3, deadline=deadline)
    store.close()
    assert opened.stats().num_objects == kept
    opened.clear()
