"""Pages in a real Valkey: what it keeps, refuses, loses; and what becomes of a call then."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import StoreError, StoreURLError
from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName
from quire.store.client import PageStore
from quire.store.codec import Mismatch, object_name
from quire.store.maintenance import list_objects, verify
from quire.store.redis import RedisStore
from quire.store.redis import connection as connections
from quire.store.redis.connection import Address, Login, RedisConnection
from quire.store.redis.nodes import Nodes
from quire.store.redis.wire import command
from quire.store.url import open_store, redact
from quire.types import PageStatus
from store_servers import Link, Valkey, clustered, node_id, told, wait_for
from unit.store.conftest import counted

OK, MISS = PageStatus.OK, PageStatus.MISS


@pytest.fixture
def store(valkey: Valkey) -> Iterator[RedisStore]:
    valkey.say(b"FLUSHALL")
    opened = open_store(valkey.url)
    assert isinstance(opened, RedisStore)
    yield opened
    opened.close()


@pytest.fixture
def cache(store: RedisStore, client: Callable[..., PageStore]) -> PageStore:
    return client(store)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Valkey]]:
    made: list[Valkey] = []

    def make(**options: str) -> Valkey:
        made.append(Valkey(tmp_path, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def test_pages_come_back_as_they_were(cache, pages):
    assert pages.put_path(cache, 1, 2, 3) == [OK] * 3
    assert pages.usable(cache, 1, 2, 3, 4) == 3
    assert pages.get(cache, 1, 2, 3, 4) == [OK, OK, OK, MISS]


def answers_when_all_have_come(number: int) -> tuple[threading.Thread, int]:
    """A server that says nothing before so many have been asked for; and its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            line, _ = listener.accept()
        with line:
            assert b"CLUSTER" in line.recv(1 << 16)
            line.sendall(b"-ERR This instance has cluster support disabled\r\n")
            assert b"GET" in line.recv(1 << 16)  # may we read?
            line.sendall(b":0\r\n$-1\r\n")
            heard = b""
            while heard.count(b"EXISTS") < number or not heard.endswith(b"\r\n"):
                heard += line.recv(1 << 16)
            line.sendall(b":1\r\n:0\r\n" * (number // 2))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, listener.getsockname()[1]


def test_a_probe_of_many_pages_is_one_round_trip(pages):
    number = 256
    server, port = answers_when_all_have_come(number)
    store = open_store(f"redis://127.0.0.1:{port}")
    names = [object_name(pages.part, pages.key(n)) for n in range(number)]
    assert store.contains(names, deadline=time.monotonic() + 60) == [True, False] * (number // 2)
    store.close()
    server.join(60)


def test_pages_are_found_by_another_engine_and_after_its_end(cache, client, valkey, pages):
    pages.put_path(cache, 1, 2)
    cache.close()
    assert pages.get(client(open_store(valkey.url)), 1, 2) == [OK, OK]


def test_a_page_without_the_one_before_it_is_not_stored_c36(cache, pages):
    assert pages.put_path(cache, 2, 3, after=1) == [PageStatus.ORPHAN] * 2
    assert pages.there(cache, 2, 3) == []
    pages.put_path(cache, 1)
    assert pages.put_path(cache, 2, 3, after=1) == [OK, OK]


def test_what_lies_behind_a_hole_is_not_kept_by_asking_c36(cache, pages, valkey):
    pages.put_path(cache, 1, 2, 3)
    names = [object_name(pages.part, key).text for key in pages.keys(1, 2, 3)]
    keys = [f"quire:{{{name}}}".encode() for name in names]
    valkey.say(b"DEL", keys[1])
    time.sleep(2.1)  # the server counts in seconds
    assert pages.usable(cache, 1, 2, 3) == 1
    idle = [valkey.say(b"OBJECT", b"IDLETIME", key) for key in (keys[0], keys[2])]
    assert idle[0] < idle[1]


def test_a_damaged_page_is_a_miss_and_is_kept_for_a_person_c17(cache, pages, valkey):
    pages.put_path(cache, 1, 2)
    key = f"quire:{{{object_name(pages.part, pages.key(2)).text}}}".encode()
    valkey.say(b"SETRANGE", key, str(HEADER_BYTES + 100).encode(), b"damage")
    assert pages.get(cache, 1, 2) == [OK, PageStatus.CORRUPT]
    assert pages.get(cache, 1, 2) == [OK, MISS]
    aside = key.replace(b"quire:", b"quire:quarantine")
    assert 0 < valkey.say(b"TTL", aside) <= 7 * 24 * 3600
    assert pages.put_path(cache, 2, after=1) == [OK]
    assert pages.get(cache, 1, 2) == [OK, OK]


@pytest.mark.parametrize("value", [b"", b"x", b"x" * HEADER_BYTES, b"x" * (1 << 20)])
def test_a_value_of_another_size_is_no_page_and_the_next_is_read_right_c17(
    cache, pages, valkey, value
):
    pages.put_path(cache, 1, 2)
    valkey.say(b"SET", f"quire:{{{object_name(pages.part, pages.key(1)).text}}}".encode(), value)
    assert pages.get(cache, 1, 2)[0] in (PageStatus.CORRUPT, MISS)
    assert pages.get(cache, 2) == [OK]


@pytest.mark.parametrize("kind", [b"LPUSH", b"SADD", b"XADD"])
def test_a_key_that_holds_no_value_is_a_damaged_page_and_is_written_again_c17(
    cache, pages, valkey, kind
):
    """Somebody's slip: a list where a page should be."""
    key = key_of(pages, 1)
    valkey.say(*{b"XADD": (kind, key, b"*", b"a", b"b")}.get(kind, (kind, key, b"a")))
    assert pages.put_path(cache, 1, 2) == [OK, OK]  # it seems to be there
    (odd,) = [item for item in list_objects(valkey.url) if item.name.key == pages.key(1)]
    assert odd.size_bytes == 0
    assert verify(valkey.url).mismatches == {Mismatch.LENGTH: 1}
    assert pages.get(cache, 1, 2) == [PageStatus.CORRUPT, OK]
    assert pages.get(cache, 1, 2) == [MISS, OK]
    assert cache.health()[0].answers
    aside = key.replace(b"quire:", b"quire:quarantine")
    assert valkey.say(b"EXISTS", aside) == 1
    assert pages.put_path(cache, 1) == [OK]
    assert pages.get(cache, 1, 2) == [OK, OK]


def test_where_a_damaged_page_cannot_be_set_aside_it_is_dropped_c17(servers, client, pages):
    """By a user who may not rename."""
    server = servers()
    server.say(b"ACL", b"SETUSER", b"us", b"on", b">pw", b"~*", b"+@all", b"-rename")
    cache = client(open_store(f"redis://us:pw@{server.address}"))
    pages.put_path(cache, 1)
    server.say(b"SETRANGE", key_of(pages, 1), b"5000", b"damage")
    assert pages.get(cache, 1) == [PageStatus.CORRUPT]
    assert pages.put_path(cache, 1) == [OK]
    assert pages.get(cache, 1) == [OK]


def test_a_damaged_page_that_stays_is_told_as_damaged_c17(servers, client, pages):
    """By a user who may only read: it is not called one that was evicted meanwhile."""
    server = servers()
    owner = client(open_store(server.url))
    server.say(b"ACL", b"SETUSER", b"us", b"on", b">pw", b"~*", b"+@read", b"+cluster")
    cache = client(open_store(f"redis://us:pw@{server.address}"))
    pages.put_path(owner, 1)
    server.say(b"SETRANGE", key_of(pages, 1), b"5000", b"damage")
    assert pages.get(cache, 1) == [PageStatus.CORRUPT]
    assert counted(cache, "mismatch") == {Mismatch.CHECKSUM: 1}


def key_of(pages: Any, n: int) -> bytes:
    return f"quire:{{{object_name(pages.part, pages.key(n)).text}}}".encode()


def test_what_others_keep_there_is_left_alone(cache, store, pages, valkey):
    foreign = {b"quire:{x}": b"1", b"other": b"2", b"quire:y": b"3"}
    for key, value in foreign.items():
        valkey.say(b"SET", key, value)
    pages.put_path(cache, 1, 2, 3)
    assert len(list(store.scan())) == 3
    assert store.clear() == 3
    assert pages.get(cache, 1, 2, 3) == [MISS] * 3
    assert {key: valkey.say(b"GET", key) for key in foreign} == foreign


def test_prefixes_are_stores_of_their_own(valkey, client, pages):
    valkey.say(b"FLUSHALL")
    one, other = (client(open_store(f"{valkey.url}/1?prefix={name}:")) for name in "ab")
    pages.put(one, 1)
    assert pages.get(other, 1) == [MISS]
    assert other._store.clear() == 0
    assert pages.get(one, 1) == [OK]


def test_a_full_server_refuses_and_serves_c17(servers, client, pages):
    server = servers(maxmemory="3mb", maxmemory_policy="noeviction")
    cache = client(open_store(server.url))
    statuses = [pages.put(cache, n)[0] for n in range(1, 400)]
    assert set(statuses) == {OK, PageStatus.REJECTED}
    assert pages.get(cache, 1) == [OK]
    stats = cache._store.stats()
    assert stats.capacity_bytes == 3 << 20
    assert stats.used_bytes


def test_a_server_that_evicts_goes_on_taking_pages(servers, client, pages):
    server = servers(maxmemory="4mb", maxmemory_policy="allkeys-lru")
    cache = client(open_store(server.url))
    assert {pages.put(cache, n)[0] for n in range(1, 500)} == {OK}
    assert cache._store.stats().evicted_objects > 0


def test_a_server_that_starts_again_is_asked_again(servers, client, pages):
    server = servers()
    cache = client(open_store(server.url))
    pages.put_path(cache, 1, 2)
    server.stop()
    server.start()
    assert pages.get(cache, 1) == [MISS]  # on a connection that died meanwhile
    assert pages.put_path(cache, 1, 2) == [OK, OK]


def test_a_server_that_is_gone_fails_within_the_deadline(servers, client, pages):
    server = servers()
    cache = client(open_store(server.url))
    pages.put(cache, 1)
    server.stop()
    assert pages.get(cache, 1) == [PageStatus.FAILED]
    assert pages.put(cache, 2) == [PageStatus.FAILED]


def test_a_server_that_hangs_is_left_at_the_deadline_and_asked_later(servers, client, pages):
    server = servers()
    cache = client(open_store(server.url))
    pages.put_path(cache, 1, 2)
    server.pause()
    assert pages.get(cache, 1, 2, deadline=time.monotonic() + 0.3) == [PageStatus.TIMEOUT] * 2
    server.go_on()
    # What it answers late to the call before must not be taken for the answer to this one.
    assert pages.get(cache, 2, 1) == [OK, OK]


@pytest.fixture
def link(valkey: Valkey) -> Iterator[Link]:
    valkey.say(b"FLUSHALL")
    made = Link(valkey.port)
    yield made
    made.close()


def test_connections_that_were_quiet_and_are_forgotten_cost_one_call(link, client, pages):
    """By a firewall, overnight: nobody is told, and as many as were used at once are dead."""
    store = open_store(f"redis://127.0.0.1:{link.port}")
    cache = client(store)
    pages.put_path(cache, *range(1, 9))
    idle = store._nodes._idle[store._nodes.addresses[0]]
    idle += [RedisConnection(idle[0].address, Login(), time.monotonic() + 60) for _ in range(6)]
    for each in idle:
        each.send(command(b"PING"), time.monotonic() + 60)
        assert each.answer() == b"PONG"
    link.forget()
    assert pages.get(cache, 1, deadline=time.monotonic() + 0.3) == [PageStatus.TIMEOUT]
    assert pages.get(cache, 1, 2) == [OK, OK]
    assert pages.put_path(cache, 9, after=8) == [OK]


class TrickleLine:
    """TLS to somebody who takes a record a second."""

    def __init__(self, clock):
        self.clock = clock

    def settimeout(self, seconds):
        pass

    def send(self, data):
        self.clock.now += 1
        return min(len(data), 16 << 10)

    def sendall(self, data):
        for at in range(0, len(data), 16 << 10):
            self.send(data[at:])

    def close(self):
        pass


def test_a_page_that_trickles_away_by_tls_is_given_up_at_the_deadline(clock, monkeypatch):
    monkeypatch.setattr(connections, "_connect", lambda *_: TrickleLine(clock))
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=clock))
    login = Login(tls=ssl.create_default_context())
    line = RedisConnection(Address("cache", 6379), login, clock.now + 60)
    began = clock.now
    with pytest.raises(TimeoutError):
        line.send([memoryview(bytes(1 << 20))], began + 3)
    assert clock.now <= began + 3


def test_of_two_addresses_of_a_name_the_one_that_answers_is_used(valkey, monkeypatch):
    """The other is that of a machine that is gone: nobody says no there."""
    address = Address("cache.internal", valkey.port)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        queued = [socket.socket() for _ in range(4)]  # those that it does not take any more
        for each in queued:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        places = [(*kind, silent.getsockname()), (*kind, ("127.0.0.1", valkey.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
        deadline = time.monotonic() + 3
        line = RedisConnection(address, Login(), deadline)
        line.send(command(b"PING"), deadline)
        assert line.answer() == b"PONG"
        for each in (line, *queued):
            each.close()


def test_after_a_failover_writes_go_where_the_name_leads_by_then(servers, client, pages):
    """The old server serves on, as a replica that takes no writes."""
    old, new = servers(), servers()
    link = Link(old.port)
    try:
        cache = client(open_store(f"redis://127.0.0.1:{link.port}"))
        pages.put_path(cache, 1, 2)
        old.say(b"REPLICAOF", b"127.0.0.1", b"%d" % new.port)
        link.lead_to(new.port)
        assert pages.put(cache, 3) == [PageStatus.REJECTED]
        assert pages.put(cache, 4) == [OK]
        assert new.say(b"DBSIZE") == 1
        assert pages.get(cache, 4) == [OK]
    finally:
        link.close()


def test_many_threads_share_it(cache, pages):
    wrong: list[Any] = []

    def work(first: int) -> None:
        for n in range(first, first + 40):
            if pages.put(cache, n) != [OK] or pages.get(cache, n) != [OK]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_call_asks_for_many(store, pages):
    names = [object_name(pages.part, key) for key in pages.keys(*range(1, 257))]
    before = store._nodes
    assert store.contains(names, deadline=time.monotonic() + 10) == [False] * 256
    assert sum(map(len, before._idle.values())) == 1


def test_a_page_whose_parent_does_not_land_does_not_stay(store, pages, monkeypatch):
    """The server refuses the first of two and takes the second."""

    def named(n: int) -> ObjectName:
        return object_name(pages.part, pages.key(n))

    def new(n: int, parent: ObjectName | None) -> NewObject:
        return NewObject(named(n), Blob(memoryview(bytes(HEADER_BYTES)), pages.full(n)), parent, 1)

    ask = store._nodes.ask

    def refusing(exchanges: Any, deadline: float) -> list[Any]:
        answers = ask(exchanges, deadline)
        if exchanges and next(iter(exchanges[0].said)).startswith(b"*4\r\n$3\r\nSET"):
            answers[0] = TimeoutError()
        return answers

    monkeypatch.setattr(store._nodes, "ask", refusing)
    statuses = store.put([new(1, None), new(2, named(1))], deadline=time.monotonic() + 10)
    assert statuses == [PageStatus.TIMEOUT, PageStatus.ORPHAN]
    assert store.contains([named(2)], deadline=time.monotonic() + 10) == [False]


def test_what_follows_a_page_that_was_just_made_here_is_written_unasked(
    store, valkey, client, pages, monkeypatch
):
    calls: list[int] = []
    ask = Nodes.ask

    def noted(self: Nodes, exchanges: Any, deadline: float) -> list[Any]:
        calls.append(len(exchanges))
        return ask(self, exchanges, deadline)

    monkeypatch.setattr(Nodes, "ask", noted)
    cache, other = client(store), client(open_store(valkey.url))
    pages.put_path(cache, 1, 2)
    calls.clear()
    assert pages.put_path(cache, 3, 4, after=2) == [OK] * 2
    assert calls == [3]  # two pages, and whether the one before them is there still
    calls.clear()
    assert pages.put_path(other, 3, 4, after=2) == [OK] * 2  # which knows nothing of it
    assert calls[:2] == [1, 2]
    calls.clear()
    assert pages.put_path(other, 5, after=4) == [OK]  # it was there: others write here too
    assert calls == [1, 2]


@pytest.mark.parametrize("how", ["taken out", "cleared", "found to be gone", "gone"])
def test_a_page_that_is_gone_is_not_taken_for_one_that_was_just_made(
    store, valkey, client, pages, how
):
    cache = client(store)
    pages.put_path(cache, 1, 2)
    name = object_name(pages.part, pages.key(2))
    assert store.has_made(name)
    if how == "taken out":
        store.quarantine(name)
    elif how == "cleared":
        store.clear()
    else:
        valkey.say(b"FLUSHALL")
    if how == "found to be gone":
        assert pages.usable(cache, 1, 2) == 0
    assert store.has_made(name) is (how == "gone")
    assert pages.put_path(cache, 3, after=2) == [PageStatus.ORPHAN]
    assert not store.has_made(name)
    assert pages.there(cache, 3) == []


def test_a_page_that_another_wrote_meanwhile_stays_as_it_is(store, pages):
    name = object_name(pages.part, pages.key(1))

    def put(n: int) -> list[PageStatus]:
        blob = Blob(memoryview(bytes(HEADER_BYTES)), pages.full(n))
        return store.put([NewObject(name, blob, None, 1)], deadline=time.monotonic() + 10)

    assert put(1) == put(2) == [OK]
    into = Blob(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(pages.part.page_bytes)))
    assert store.get([name], [into], deadline=time.monotonic() + 10) == [OK]
    assert into.payload == pages.full(1)


# ---- who may, and where --------------------------------------------------------------------------


def test_a_password_is_needed_where_one_is_set_and_never_shown(servers, client, pages):
    server = servers(requirepass="s3cret")
    url = f"redis://default:s3cret@{server.address}"
    assert pages.put(client(open_store(url)), 1) == [OK]
    refused = "refuses our user and password"
    for wrong, sentence in (
        ("default:guessed@", refused),
        ("guessed:s3cret@", refused),
        ("guessed@", refused),  # also without a password: it is not another user's
        (":guessed/7@", "names no server.* a slash in a password as %2F"),
        ("", "asks for a password .*write redis://user:password@host"),
    ):
        with pytest.raises(StoreError, match=sentence) as caught:
            open_store(f"redis://{wrong}{server.address}")
        assert "guessed" not in str(caught.value)
        assert "s3cret" not in str(caught.value)
    assert redact(url) == f"redis://***@{server.address}"


def test_a_database_that_is_not_there_is_told_from_a_wrong_password(valkey):
    with pytest.raises(StoreError, match=r"does not give us our database .*another number"):
        open_store(f"{valkey.url}/99")


@pytest.mark.parametrize("rights", [(), (b"~other:*", b"+@all")])
def test_a_user_who_may_not_read_here_is_told_at_once(servers, rights):
    """An engine that starts with it would find nothing, and nobody would know."""
    server = servers()
    server.say(b"ACL", b"SETUSER", b"us", b"on", b">pw", *rights)
    with pytest.raises(StoreError, match="does not let this user read our keys") as caught:
        open_store(f"redis://us:pw@{server.address}")
    assert "pw" not in str(caught.value)


def documented_rights() -> list[bytes]:
    said = (Path(__file__).parents[3] / "docs/stores.md").read_text()
    (line,) = re.findall("^ACL SETUSER .*$", said, re.MULTILINE)
    return line.encode().split()


def test_a_user_with_the_rights_that_are_documented_may_do_all_of_it(servers, client, pages):
    server = servers()
    assert server.say(*documented_rights()) == b"OK"
    store = open_store(f"redis://quire:password@{server.address}/1")
    cache = client(store)
    assert pages.put_path(cache, 1, 2) == [OK, OK]
    assert pages.put_path(cache, 3, after=9) == [PageStatus.ORPHAN]
    assert pages.usable(cache, 1, 2) == 2
    assert pages.get(cache, 1, 2) == [OK, OK]
    assert len(list(store.scan())) == 2
    assert store.stats().used_bytes
    assert store.quarantine(object_name(pages.part, pages.key(1)))
    assert store.clear() == 1
    assert not counted(cache, "error")
    login = Login("default", "", 1)
    soon = time.monotonic() + 60
    with closing(RedisConnection(Address("127.0.0.1", server.port), login, soon)) as other:
        other.send(command(b"KEYS", b"*"), soon)
        (kept,) = other.answer()
    assert kept.startswith(b"quire:quarantine")


def test_a_user_who_may_only_read_reads(servers, client, pages):
    """However often it is refused when it writes."""
    server = servers()
    server.say(b"ACL", b"SETUSER", b"us", b"on", b">pw", b"~*", b"+@read", b"+cluster")
    pages.put_path(client(open_store(server.url)), 1, 2)
    cache = client(open_store(f"redis://us:pw@{server.address}"))
    for n in range(10, 30):
        assert pages.put(cache, n) == [PageStatus.REJECTED]
    assert pages.usable(cache, 1, 2) == 2
    assert pages.get(cache, 1, 2) == [OK, OK]


@pytest.mark.parametrize("password", ["", "s3cret"])
def test_a_server_that_has_no_room_for_another_client_is_told(servers, password):
    server = servers(requirepass=password)
    server.password = password
    server.say(b"CONFIG", b"SET", b"maxclients", b"1")
    url = f"redis://:{password}@{server.address}"
    with (
        closing(open_store(url)),
        pytest.raises(StoreError, match=r"takes no more clients .*raise its maxclients"),
    ):
        open_store(url)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_what_is_no_redis_is_told_with_what_to_check(moto, scheme):
    other = {"redis": "rediss", "rediss": "redis"}[scheme]
    with pytest.raises(StoreError, match=rf"cannot be reached .*TLS, write {other}://") as caught:
        open_store(f"{scheme}://:s3cret@127.0.0.1:{moto.port}")
    assert "s3cret" not in str(caught.value)


NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


class Alike:
    """A server that speaks as Redis does, and says the same to whatever it is asked, by word."""

    def __init__(self, **says: bytes) -> None:
        self._says = {"CLUSTER": NO_CLUSTER, "EXISTS": b":0\r\n", "GET": b"$-1\r\n"} | says
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line:
                while words := re.findall(rb"\$\d+\r\n([A-Z]+)\r\n", line.recv(1 << 16)):
                    line.sendall(b"".join(self._says.get(w.decode(), b"") for w in words))


def test_a_server_that_knows_no_pages_is_told_at_once():
    """As a Sentinel, whose port is easily taken for the server's."""
    unknown = b"-ERR unknown command\r\n"
    with (
        closing(Alike(EXISTS=unknown, GET=unknown)) as sentinel,
        pytest.raises(StoreError, match=r"turns us away \(ERR\): check the store's URL"),
    ):
        open_store(sentinel.url)


@pytest.mark.parametrize("said", [b"*1\r\n:5\r\n", b":5\r\n", b"*1\r\n*3\r\n:1\r\n:2\r\n*0\r\n"])
def test_one_who_says_of_its_cluster_what_makes_no_sense_is_no_redis(said):
    with (
        closing(Alike(CLUSTER=said)) as odd,
        pytest.raises(StoreError, match=r"cannot be reached .*not what Redis says"),
    ):
        open_store(odd.url)


@pytest.mark.parametrize(
    "said", [b":5\r\n", b"*0\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"+x\r\n"]
)
def test_one_who_lists_what_are_no_keys_is_told_in_a_sentence(said):
    with closing(Alike(SCAN=said)) as odd, pytest.raises(StoreError, match="check the URL"):
        list(list_objects(odd.url))


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://host:0",
        "redis://host:x",
        "redis://u:pw@host/seven",
        "redis://u:pw@host?prefix=a%20b",
        "redis://u:pw@host?prefix=",
        "redis://u:pw@host?nothing=1",
        "redis://u:pw@host?ca=/etc/none",
        "rediss://u:pw@host?ca=/etc/none",
    ],
)
def test_a_url_that_says_nothing_sensible_is_one_sentence_without_the_password(url):
    with pytest.raises(StoreURLError) as caught:
        open_store(url)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nobody_there_is_one_sentence_with_what_to_do():
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1 cannot be reached .*start Redis"):
        open_store("redis://127.0.0.1:1")


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_a_host_that_can_be_none_is_one_sentence(host):
    with pytest.raises(StoreError, match="is no address") as caught:
        open_store(f"redis://{host}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("password", ["\udcff\udcfe", "%FF%FE"])
def test_a_password_may_be_of_any_bytes(servers, client, pages, password):
    """As the shell gives them, and as they are written in a URL."""
    server = servers()
    server.say(b"ACL", b"SETUSER", b"us", b"on", b">\xff\xfe", b"~*", b"+@all")
    assert pages.put(client(open_store(f"redis://us:{password}@{server.address}")), 1) == [OK]


def test_people_can_list_it(cache, pages, valkey):
    pages.put_path(cache, 1, 2, 3)
    assert len(list(list_objects(valkey.url))) == 3


def test_a_server_that_dies_while_people_list_it_is_one_sentence(servers, client, pages):
    server = servers()
    pages.put(client(open_store(server.url)), *range(1, 1200))
    listed = list_objects(server.url)
    next(listed)
    server.stop()
    with pytest.raises(StoreError, match="look at its server or disk"):
        list(listed)


# ---- clusters ------------------------------------------------------------------------------------


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[list[Valkey]]:
    """To be changed: as the other, and a server that follows the second."""
    with clustered(tmp_path, num_followers=1) as nodes:
        yield nodes


def test_a_cluster_has_each_page_in_its_place(cluster, client, pages):
    cache = client(open_store(cluster[0].url))
    numbers = range(1, 17)
    assert pages.put_path(cache, *numbers) == [OK] * 16
    assert pages.get(client(open_store(cluster[1].url)), *numbers) == [OK] * 16
    sizes = [node.say(b"DBSIZE") for node in cluster]
    assert all(sizes)
    assert sum(sizes) == 16
    assert cache._store.clear() == 16


def test_pages_that_moved_to_another_server_are_found(cluster, client, pages):
    """The slots that were known at the start are not those that are."""
    store = open_store(cluster[0].url)
    cache = client(store)
    pages.put_path(cache, *range(1, 9))
    store._nodes._slots = list(reversed(store._nodes._slots))
    assert pages.get(cache, *range(1, 9)) == [OK] * 8
    store.clear()


def test_pages_are_found_and_written_while_their_slots_move_to_another_server(
    own_cluster, client, pages
):
    """As when somebody adds a server: of a slot that is on its way some keys are here, some there,
    and new ones belong there."""
    source, target = own_cluster[:2]
    for node in own_cluster:
        assert node.say(*documented_rights()) == b"OK"
    cache = client(open_store(f"redis://quire:password@{source.address}"))
    numbers = range(1, 17)
    pages.put_path(cache, *numbers[:8])
    ids = node_id(source), node_id(target)
    keys = [f"quire:{{{object_name(pages.part, pages.key(n)).text}}}".encode() for n in numbers]
    slots = {key: source.say(b"CLUSTER", b"KEYSLOT", key) for key in keys}
    moving = {key: b"%d" % slot for key, slot in slots.items() if slot < 8192}
    for slot in set(moving.values()):
        target.say(b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", ids[0])
        source.say(b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", ids[1])
    there = (b"127.0.0.1", b"%d" % target.port)
    moved = [key for key in keys[:8:2] if key in moving]
    assert moved
    for key in moved:
        assert source.say(b"MIGRATE", *there, key, b"0", b"9000") == b"OK"
    assert pages.usable(cache, *numbers[:8]) == 8
    assert pages.get(cache, *numbers[:8]) == [OK] * 8
    assert pages.put_path(cache, *numbers[8:], after=8) == [OK] * 8
    assert pages.get(cache, *numbers) == [OK] * 16
    assert not counted(cache, "error")
    for key, slot in moving.items():  # and when it is over
        source.say(b"MIGRATE", *there, key, b"0", b"9000")
        for node in (target, source):
            node.say(b"CLUSTER", b"SETSLOT", slot, b"NODE", ids[1])
    assert pages.get(cache, *numbers) == [OK] * 16


def test_of_a_server_that_has_left_the_cluster_no_connection_is_kept(own_cluster, client, pages):
    source, target = own_cluster[:2]
    cache = client(open_store(source.url))
    pages.put_path(cache, *range(1, 9))
    own = (b"CLIENT", b"LIST", b"TYPE", b"normal")
    assert len(source.say(*own).splitlines()) == 2, "ours, and that of who asks"
    source.say(b"FLUSHALL")
    half = (b"0", b"8191")
    for node in own_cluster:
        node.say(b"CLUSTER", b"DELSLOTSRANGE", *half)
    target.say(b"CLUSTER", b"ADDSLOTSRANGE", *half)
    wait_for(lambda: len(source.say(b"CLUSTER", b"SLOTS")) == 1)
    wait_for(lambda: told(source, "cluster_state") == "ok")
    pages.get(cache, *range(1, 9))
    assert len(source.say(*own).splitlines()) == 1


def test_a_cluster_whose_servers_go_by_names_that_they_do_not_have_is_asked_by_address(
    own_cluster, client, pages
):
    """It says `?` then, instead of a host."""
    for node in own_cluster:
        node.say(b"CONFIG", b"SET", b"cluster-preferred-endpoint-type", b"unknown-endpoint")
    unnamed = open_store(own_cluster[0].url)
    for node in own_cluster:
        node.say(b"CONFIG", b"SET", b"cluster-preferred-endpoint-type", b"hostname")
    store = open_store(own_cluster[0].url)
    assert store._nodes.addresses == unnamed._nodes.addresses
    unnamed.close()
    cache, numbers = client(store), range(1, 17)
    assert pages.put_path(cache, *numbers) == [OK] * 16
    store._nodes._slots = list(reversed(store._nodes._slots))
    assert pages.get(cache, *numbers) == [OK] * 16


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_pages_are_found_again_when_a_replica_takes_over(own_cluster, client, pages, how):
    first, second, follower = own_cluster
    cache = client(open_store(first.url))
    numbers = range(1, 17)
    assert pages.put_path(cache, *numbers) == [OK] * 16
    replication = (b"INFO", b"replication")
    wait_for(lambda: told(follower, "master_link_status", replication) == "up")
    wait_for(lambda: follower.say(b"DBSIZE") == second.say(b"DBSIZE"))
    seen = (b"CLUSTER", b"SLOTS")
    # Who takes over must be known to others by then: only its predecessor could tell them.
    wait_for(lambda: follower.port in [each[1] for slots in first.say(*seen) for each in slots[3:]])  # type: ignore[attr-defined]
    (second.stop if how == "dead" else second.pause)()
    assert follower.say(b"CLUSTER", b"FAILOVER", b"TAKEOVER") == b"OK"
    wait_for(lambda: follower.port in [slots[2][1] for slots in first.say(*seen)])  # type: ignore[attr-defined]
    wait_for(lambda: pages.get(cache, *numbers, deadline=time.monotonic() + 1) == [OK] * 16)
    assert pages.usable(cache, *numbers) == 16
