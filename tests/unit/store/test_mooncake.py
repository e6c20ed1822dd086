"""A pool of memory: what is full, gone or silent, on a real master and real holders."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from quire.errors import StoreError, StoreURLError
from quire.store.base import HEADER_BYTES, MAX_BYTES, Blob, NewObject
from quire.store.codec import object_name
from quire.store.mooncake import pool as clients
from quire.store.mooncake import store as stores
from quire.store.mooncake.master import Master
from quire.store.mooncake.pool import NO_ROOM, TRANSFER_FAILED, Bytes
from quire.store.mooncake.registration import MAX_POOLS, POOL_BYTES, Memory
from quire.store.mooncake.store import PUT_TRIES, MooncakeStore
from quire.store.url import open_store
from quire.types import PageStatus
from store_servers import KeptOpen, Mooncake
from unit.store.conftest import PAGE_BYTES

OK, MISS = PageStatus.OK, PageStatus.MISS


@pytest.fixture(scope="module")
def joined(mooncake):
    with closing(open_store(mooncake.url)) as store:
        yield store


@pytest.fixture
def cache(joined, client):
    joined.clear()
    return client(KeptOpen(joined))


@pytest.fixture
def own_pool(tmp_path):
    """To be broken."""
    made = []

    def make(**options):
        made.append(Mooncake(tmp_path, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.stop()


# ---- memory --------------------------------------------------------------------------------------


class Registered:
    def __init__(self):
        self.calls = []
        self.memory = Memory(self.register, self.calls.append)

    def register(self, address, size_bytes):
        self.calls.append((address, size_bytes))
        return True


def test_a_host_pool_is_registered_once_and_its_pages_move_in_place():
    known = Registered()
    pool = memoryview(mmap.mmap(-1, 2 * POOL_BYTES))
    first, last = pool[:HEADER_BYTES], pool[-HEADER_BYTES:]
    start = known.memory.in_place(first)
    assert known.memory.in_place(last) == start + 2 * POOL_BYTES - HEADER_BYTES
    assert known.calls == [(start, 2 * POOL_BYTES)]


def test_small_and_passing_memory_is_not_registered():
    known = Registered()
    assert known.memory.in_place(memoryview(bytearray(2 * POOL_BYTES))) is None
    assert known.memory.in_place(memoryview(mmap.mmap(-1, HEADER_BYTES))) is None
    assert known.calls == []


def test_registered_pools_are_bounded():
    known = Registered()
    pools = [memoryview(mmap.mmap(-1, POOL_BYTES)) for _ in range(MAX_POOLS + 2)]
    placed = [known.memory.in_place(pool) for pool in pools]
    assert placed[-2:] == [None, None]
    assert None not in placed[:-2]


def test_a_stage_is_used_again_and_a_small_one_gives_way():
    known = Registered()
    for size_bytes in (10, 100, 3 << 20, 3 << 20, 10):
        with known.memory.stage(size_bytes) as stage:
            assert stage.take(size_bytes)[0].nbytes == size_bytes
    registered = [call for call in known.calls if isinstance(call, tuple)]
    assert [size_bytes for _, size_bytes in registered] == [1 << 20, 4 << 20]
    assert len(known.calls) == 3


class Client:
    """Of Mooncake, as far as memory is concerned; all of them together know what is registered."""

    def __init__(self, registered):
        self.registered = registered

    def register_buffer(self, address, size_bytes):
        self.registered[address] = size_bytes
        return 0

    def unregister_buffer(self, address):
        return 0 if self.registered.pop(address, None) else -600

    def batch_is_exist(self, keys):
        return [1] * len(keys)

    def close(self):
        self.registered.clear()


def test_a_stage_that_gives_way_while_the_pool_is_not_there_is_not_registered_again(monkeypatch):
    """Its memory is somebody else's by then."""
    registered, is_there = {}, [True]

    def join(settings):
        if not is_there[0]:
            raise StoreError("nobody is there")
        return Client(registered), None

    monkeypatch.setattr(clients, "join", join)
    pool = clients.Pool(clients.PoolSettings("master:50051", "here"))
    memory = Memory(pool.register, pool.unregister)
    with memory.stage(10) as stage:
        small = stage.address
    assert list(registered) == [small]
    pool._leave()
    is_there[0] = False
    with pytest.raises(StoreError, match="nobody"), memory.stage(3 << 20):
        """Not given."""
    is_there[0] = True
    assert pool.exists(["a"]) == [1]
    assert registered == {}
    with memory.stage(3 << 20) as stage:
        assert registered == {stage.address: 4 << 20}


# ---- no room -------------------------------------------------------------------------------------


class FullPool:
    """Has room from the n-th time on that it is asked."""

    def __init__(self, nth):
        self.left = nth

    def register(self, address, size_bytes):
        return True

    def unregister(self, address):
        pass

    def put(self, objects):
        self.left -= 1
        return [0 if self.left <= 0 else NO_ROOM] * len(objects)

    def close(self):
        pass


@pytest.mark.parametrize(("nth", "status"), [(3, OK), (100, PageStatus.REJECTED)])
def test_a_put_without_room_is_tried_again_and_counted(client, pages, nth, status):
    pauses = []
    store = MooncakeStore(FullPool(nth), None, sleep=pauses.append)
    new = NewObject(
        object_name(pages.part, pages.key(1)),
        Blob(memoryview(bytearray(HEADER_BYTES)), pages.full(1)),
        None,
        time.time_ns(),
    )
    assert store.put([new], deadline=time.monotonic() + 60) == [status]
    assert client(store).counters()["retried_puts"] == len(pauses) == min(nth, PUT_TRIES) - 1


# ---- no holder -----------------------------------------------------------------------------------


class DeadHolder(FullPool):
    """The master still believes in it."""

    def __init__(self, size_bytes):
        super().__init__(1)
        self.size_bytes = size_bytes
        self.removed = []

    def exists(self, keys):
        return [1] * len(keys)

    def get(self, objects):
        return [TRANSFER_FAILED] * len(objects)

    def size(self, key):
        return self.size_bytes

    def remove(self, keys):
        self.removed += keys
        return [0] * len(keys)


@pytest.mark.parametrize("size_bytes", [1, HEADER_BYTES, 2 * HEADER_BYTES, 1 << 30])
def test_a_packed_page_that_nobody_can_read_is_lost_and_no_damage(client, pages, size_bytes):
    pool = DeadHolder(size_bytes)
    cache = client(MooncakeStore(pool, None))
    assert pages.get(cache, 1) == [MISS]
    assert pool.removed == []
    assert cache.counters()["lost_objects"] == 1
    assert pages.there(cache, 1) == [], "for as long as the master is wrong"


class TakesASecond(DeadHolder):
    """To say that nothing comes."""

    def __init__(self, size_bytes, clock):
        super().__init__(size_bytes)
        self.clock = clock

    def get(self, objects):
        self.clock.now += 1
        return super().get(objects)


def test_many_packed_pages_of_a_dead_holder_take_no_more_time_than_the_call_has(
    client, pages, clock, monkeypatch
):
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=clock))
    cache = client(MooncakeStore(TakesASecond(HEADER_BYTES, clock), None), clock=clock)
    began = clock.now
    statuses = pages.get(cache, *range(1, 17), deadline=began + 3)
    assert set(statuses) == {MISS, PageStatus.TIMEOUT}
    assert clock.now <= began + 3


def test_a_lost_page_is_asked_for_again_when_its_time_is_over_whatever_else_is_lost(
    client, pages, clock, monkeypatch
):
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=clock))
    cache = client(MooncakeStore(DeadHolder(HEADER_BYTES), None), clock=clock)
    soon = clock.now + 600
    for lost in (1, 2, 1):
        pages.get(cache, lost, deadline=soon)
        clock.now += 5
    names = [object_name(pages.part, pages.key(n)) for n in (1, 2)]
    assert cache._store.contains(names, deadline=soon) == [False, False]
    clock.now += 3
    assert cache._store.contains(names, deadline=soon) == [False, True]


# ---- what moves on ------------------------------------------------------------------------------


class GivesUp:
    """A client that waits for a minute, and goes on writing into the page until it is closed."""

    def __init__(self, clock):
        self.clock = clock
        self.page = None
        self.known = {}

    def register_buffer(self, address, size_bytes):
        self.known[address] = size_bytes
        return 0

    def batch_is_exist(self, keys):
        return [1] * len(keys)

    def get_size(self, key):
        return PAGE_BYTES + HEADER_BYTES

    def batch_get_into_multi_buffers(self, keys, addresses, sizes):
        self.page = addresses[-1][-1]
        assert any(at <= self.page < at + size for at, size in self.known.items())
        self.clock.now += 60
        return [TRANSFER_FAILED] * len(keys)

    def close(self):
        self.page = None


def test_nothing_is_written_into_a_page_of_which_the_client_did_not_see_the_end(
    client, pages, clock, monkeypatch
):
    made = []

    def join(settings):
        made.append(GivesUp(clock))
        return made[-1], None

    monkeypatch.setattr(clients, "join", join)
    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=clock), raising=False)
    monkeypatch.setattr(stores, "time", SimpleNamespace(monotonic=clock))
    pool = clients.Pool(clients.PoolSettings("master:50051", "here"))
    cache = client(MooncakeStore(pool, None), clock=clock)
    page = memoryview(mmap.mmap(-1, POOL_BYTES))[:PAGE_BYTES]
    for times in (1, 2):
        assert cache.get(pages.part, pages.keys(times), [page], deadline=clock.now + 5) == [MISS]
        assert [each.page for each in made] == [None] * len(made)
    assert len(made) > 1, "the pool is joined again, and the page is known there"


# ---- a pool that works ---------------------------------------------------------------------------


def test_pages_of_a_host_pool_come_back_byte_for_byte(cache, pages):
    pool = memoryview(mmap.mmap(-1, POOL_BYTES))
    size = pages.part.page_bytes
    sources = [pool[i * size : (i + 1) * size] for i in range(4)]
    for i, source in enumerate(sources):
        source[:] = bytes([i + 1]) * size
    keys = pages.keys(1, 2, 3, 4)
    soon = time.monotonic() + 60
    assert cache.put(pages.part, keys, sources, deadline=soon) == [OK] * 4
    pool[: 4 * size] = bytes(4 * size)
    assert cache.get(pages.part, keys, sources, deadline=soon) == [OK] * 4
    assert [source[0] for source in sources] == [1, 2, 3, 4]


def test_engines_that_give_memory_are_a_pool_without_anybody_else(own_pool, client, pages):
    pool = own_pool(holders=0)
    first, second = (client(open_store(f"{pool.url}&segment=16MiB")) for _ in range(2))
    guest = client(open_store(f"{pool.url}&replicas=2"))
    assert guest._store.stats().capacity_bytes == 32 << 20
    assert pages.put_path(guest, *range(1, 9)) == [OK] * 8
    for each in (first, second, guest):
        assert pages.get(each, *range(1, 9)) == [OK] * 8
    first.close()
    assert pages.get(guest, *range(1, 9)) == [OK] * 8


def test_what_others_keep_there_is_left_alone(cache, joined, pages):
    pages.put_path(cache, 1, 2)
    with joined._memory.stage(HEADER_BYTES) as stage:
        _, where = stage.take(HEADER_BYTES)
        theirs = ["else", "quire:else", "quire:" + object_name(pages.part, pages.key(9)).text + "x"]
        joined._pool.put([Bytes(key, [where], [HEADER_BYTES]) for key in theirs])
    assert len(list(joined.scan())) == 2
    assert joined.clear() == 2
    assert joined._pool.exists(theirs) == [1, 1, 1]
    joined._pool.remove(theirs)


def test_what_follows_a_page_that_was_just_made_here_is_written_unasked(
    cache, joined, pages, monkeypatch
):
    asked, exists = [], joined._pool.exists
    monkeypatch.setattr(
        joined._pool, "exists", lambda keys: asked.append(len(keys)) or exists(keys)
    )
    pages.put_path(cache, 1, 2)
    asked.clear()
    assert pages.put_path(cache, 3, 4, after=2) == [OK] * 2
    assert asked == []
    joined._made.clear()
    assert pages.put_path(cache, 5, after=4) == [OK]
    assert asked == [1, 1]


@pytest.mark.parametrize("how", ["dropped", "cleared", "found to be gone"])
def test_a_page_that_is_gone_is_not_taken_for_one_that_was_just_made(cache, joined, pages, how):
    pages.put_path(cache, 1, 2)
    name = object_name(pages.part, pages.key(2))
    assert joined.has_made(name)
    if how == "dropped":
        joined.quarantine(name)
    elif how == "cleared":
        joined.clear()
    else:
        joined._pool.remove([joined._key(name)])
        assert pages.usable(cache, 1, 2) == 1
    assert pages.put_path(cache, 3, after=2) == [PageStatus.ORPHAN]
    assert pages.there(cache, 3) == []


@pytest.mark.parametrize("how", ["huge", "late"])
def test_for_a_header_no_more_is_read_than_a_call_moves_nor_when_it_is_late(
    cache, joined, pages, monkeypatch, how
):
    key = joined._key(object_name(pages.part, pages.key(1)))
    size = 2 * pages.object_bytes + (MAX_BYTES if how == "huge" else 0)
    with joined._memory.stage(size) as stage:
        _, where = stage.take(size)
        assert joined._pool.put([Bytes(key, [where], [size])]) == [0]
    read, get = [], joined._pool.get
    soon = time.monotonic() + (60 if how == "huge" else 0.5)

    def slowly(objects):
        read.extend(sum(each.sizes) for each in objects)
        codes = get(objects)
        while how == "late" and time.monotonic() < soon:
            time.sleep(0.01)
        return codes

    monkeypatch.setattr(joined._pool, "get", slowly)
    expected = MISS if how == "huge" else PageStatus.TIMEOUT
    assert pages.get(cache, 1, deadline=soon) == [expected]
    assert read == [pages.object_bytes]
    assert joined._pool.exists([key]) == [1], "what nobody looked at is left alone"


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_dead_holder_costs_misses_and_the_pool_goes_on(own_pool, client, pages):
    pool = own_pool()
    cache = client(open_store(pool.url))
    numbers = range(1, 33)
    assert pages.put(cache, *numbers) == [OK] * 32
    pool.kill_holder(0)
    statuses = pages.get(cache, *numbers)
    assert set(statuses) == {OK, MISS}
    assert [pages.usable(cache, n) for n in numbers] == [status is OK for status in statuses]
    assert cache.counters()["breaker_opened"] == 0
    # What the pool says it has taken meanwhile, it has.
    landed = [n for n in range(101, 117) if pages.put(cache, n) == [OK]]
    assert set(pages.get(cache, *landed)) <= {OK}


@pytest.mark.long
def test_open_files_do_not_grow_with_holders_and_masters_that_come_and_go(own_pool, client, pages):
    """As many connections as were needed at once are kept, and none of those who died."""
    pool = own_pool()
    cache = client(open_store(pool.url))

    def all_at_once() -> int:
        threads = [threading.Thread(target=used, args=(cache, pages, n)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(os.listdir("/proc/self/fd"))

    files = max(all_at_once() for _ in range(4))
    for _ in range(4):
        pool.kill_holder(0)
        all_at_once()
        pool.holders.append(pool.start_holder())
        assert all_at_once() <= files + 8
    for _ in range(2):
        pool.kill_master()
        all_at_once()
        pool.start_master()
        assert all_at_once() <= files + 8


def used(cache, pages, n) -> None:
    """Written and read, as far as that works now."""
    for turn in range(4):
        numbers = [1 + 64 * (8 * turn + n) + i for i in range(16)]
        pages.put(cache, *numbers)
        pages.get(cache, *numbers)


@pytest.mark.long
def test_a_second_replica_is_read_when_the_first_holder_dies(own_pool, client, pages):
    pool = own_pool()
    cache = client(open_store(f"{pool.url}&replicas=2"))
    assert pages.put(cache, *range(1, 9)) == [OK] * 8
    pool.kill_holder(1)
    deadline = time.monotonic() + 60
    while set(pages.get(cache, *range(1, 9))) != {OK} and time.monotonic() < deadline:
        time.sleep(1)
    assert pages.get(cache, *range(1, 9)) == [OK] * 8


@pytest.mark.long
def test_a_full_pool_makes_room_for_what_is_new(own_pool, client, pages):
    pool = own_pool(holder_bytes=16 << 20, holders=1)
    cache = client(open_store(pool.url))
    statuses = [pages.put(cache, n)[0] for n in range(1, 2000)]
    assert set(statuses) <= {OK, PageStatus.REJECTED}
    assert cache.counters()["breaker_opened"] == 0
    found = pages.get(cache, *range(1, 2000))
    assert set(found) == {OK, MISS}


@pytest.mark.long
def test_a_silent_master_is_left_in_time_and_found_again(own_pool, client, pages):
    pool = own_pool(holders=1)
    cache = client(open_store(pool.url))
    pages.put(cache, 1)
    pool.pause()
    try:
        assert pages.usable(cache, 1) == 0
        assert pages.get(cache, 1) == [PageStatus.TIMEOUT]
    finally:
        pool.go_on()
    deadline = time.monotonic() + 60
    while pages.put(cache, 2) != [OK] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert pages.get(cache, 2) == [OK]


@pytest.mark.long
def test_however_much_is_read_at_once_from_a_silent_holder_no_call_hangs(own_pool, client, pages):
    pool = own_pool(holders=1)
    cache = client(open_store(pool.url))
    runs = [range(1 + 16 * i, 17 + 16 * i) for i in range(8)]
    for run in runs:
        assert pages.put(cache, *run) == [OK] * 16
    pool.pause_holder()
    readers = [
        threading.Thread(target=lambda run=run: pages.get(cache, *run), daemon=True) for run in runs
    ]
    try:
        for reader in readers:
            reader.start()
        hangs_at = time.monotonic() + 50
        for reader in readers:
            reader.join(hangs_at - time.monotonic())
        assert not any(reader.is_alive() for reader in readers)
    finally:
        pool.holder_goes_on()


@pytest.mark.long
def test_closing_while_a_call_is_under_way_waits_for_nobody(own_pool, pages):
    pool = own_pool(holders=1)
    store = open_store(pool.url)
    names = [object_name(pages.part, pages.key(1))]
    ended = []

    def look():
        with pytest.raises((TimeoutError, StoreError)):
            store.contains(names, deadline=time.monotonic() + 60)
        ended.append(True)

    asker = threading.Thread(target=look)
    pool.pause()
    asker.start()
    time.sleep(0.2)
    store.close()
    asker.join(60)
    assert ended
    with pytest.raises(StoreError):
        store.contains(names, deadline=time.monotonic() + 60)


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://host:nine",
        "mooncake://host/path",
        "mooncake://user:pw@host",
        "mooncake://host?nothing=1",
        "mooncake://127.0.0.1?replicas=0",
        "mooncake://127.0.0.1?protocol=pigeon",
        "mooncake://127.0.0.1?prefix=a%20b",
    ],
)
def test_a_url_that_says_nothing_sensible_is_one_sentence_without_secrets(url):
    with pytest.raises(StoreURLError) as caught:
        open_store(url)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_not_the_masters_for_metrics_is_one_sentence():
    """Such as its other one: who answers there does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as anybody:

        def answer():
            line, _ = anybody.accept()
            with line:
                line.recv(1 << 16)
                line.sendall(b"\0\1\2\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match=r"give its port for metrics") as caught:
            Master(f"127.0.0.1:{anybody.getsockname()[1]}").all_keys()
        thread.join(60)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_host_that_can_be_none_is_one_sentence(host):
    with pytest.raises(StoreError, match="cannot be found") as caught:
        open_store(f"mooncake://{host}")
    assert "\n" not in str(caught.value)


def test_nobody_there_is_one_sentence():
    with pytest.raises(StoreError) as caught:
        open_store("mooncake://127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_without_its_package_it_is_one_sentence_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with socket.create_server(("127.0.0.1", 0)) as anybody:
        port = anybody.getsockname()[1]
        with pytest.raises(StoreError, match=r"quire\[mooncake\]") as caught:
            open_store(f"mooncake://127.0.0.1:{port}")
    assert "\n" not in str(caught.value)
