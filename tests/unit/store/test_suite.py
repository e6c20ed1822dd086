"""The suite that every store must pass, on every store there is; and stores that must not pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any, cast
from unittest import SkipTest

import pytest

from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName, Store
from quire.store.codec import MAGIC
from quire.store.faulty import FaultRates, FaultyStore
from quire.store.file import FileStore
from quire.store.memory import MemoryStore
from quire.store.url import open_store, parse_url
from quire.testing.stores import StoreSuite, name, soon
from quire.types import PageStatus
from store_servers import KeptOpen, Mooncake, Moto, Valkey, told


class TestFiles(StoreSuite):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._root = tmp_path / "store"

    def open(self) -> Store:
        store = FileStore(self._root, reserve_bytes=0)
        assert store.wait_scanned(30)
        return store

    def open_small(self, room_bytes: int) -> Store:
        store = FileStore(self._root, reserve_bytes=0, max_bytes=room_bytes)
        assert store.wait_scanned(30)  # what is written while it counts is counted by half
        return store

    def place_foreign(self) -> Callable[[], bool]:
        self.open().close()
        theirs = self._root / "theirs"
        theirs.write_text("theirs")
        return theirs.exists


class TestMemory(StoreSuite):
    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self._store = MemoryStore()

    def open(self) -> Store:
        return self._store

    def open_small(self, room_bytes: int) -> Store:
        return MemoryStore(room_bytes)


class TestBehindFaults(TestMemory):
    """A wrapper that does no harm promises the same."""

    def open(self) -> Store:
        return FaultyStore(self._store, FaultRates(), seed=1)


class TestValkey(StoreSuite):
    page_bytes = 32 * HEADER_BYTES
    """So that what a server needs for itself is little beside a few of them."""

    secrets = ("s3cret",)

    @pytest.fixture(autouse=True)
    def _place(self, valkey: Valkey) -> Iterator[None]:
        valkey.say(b"FLUSHALL")
        valkey.say(b"ACL", b"SETUSER", b"engine", b"on", b">s3cret", b"~*", b"+@all")
        self._server = valkey
        self._url = valkey.url.replace("://", "://engine:s3cret@")
        yield
        valkey.say(b"CONFIG", b"SET", b"maxmemory", b"0")

    def open_small(self, room_bytes: int) -> Store:
        """The server counts what else it needs, too, which comes and goes: half of the room."""
        store = self.open()
        limit = int(told(self._server, "used_memory", (b"INFO", b"memory"))) + room_bytes // 2
        self._server.say(b"CONFIG", b"SET", b"maxmemory-policy", b"noeviction")
        self._server.say(b"CONFIG", b"SET", b"maxmemory", b"%d" % limit)
        return store

    def place_foreign(self) -> Callable[[], bool]:
        for key in (b"theirs", b"quire:theirs", b"quire:{theirs}"):
            self._server.say(b"SET", key, b"theirs")
        return lambda: self._server.say(b"DBSIZE") == 3

    def open(self) -> Store:
        return open_store(self._url)


class TestCluster(StoreSuite):
    """Of two servers; one is asked first."""

    @pytest.fixture(autouse=True)
    def _place(self, cluster: list[Valkey]) -> None:
        for node in cluster:
            node.say(b"FLUSHALL")
        self._nodes = cluster

    def place_foreign(self) -> Callable[[], bool]:
        for node in self._nodes:  # each takes those that are its own
            for key in (b"theirs", b"quire:theirs", b"quire:{theirs}"):
                node.say(b"SET", key, b"theirs")
        return lambda: sum(cast("int", node.say(b"DBSIZE")) for node in self._nodes) == 3

    def open(self) -> Store:
        return open_store(self._nodes[0].url)


class TestBucket(StoreSuite):
    """On a test double of S3."""

    secrets = ("s3cret",)

    @pytest.fixture(autouse=True)
    def _place(self, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
        moto.empty()
        self._url = moto.url

    def place_foreign(self) -> Callable[[], bool]:
        from quire.store.bucket import bucket_of

        bucket, path = bucket_of(parse_url(self._url)), "objects/00/theirs"
        bucket.put(path, b"theirs")
        return lambda: bool(bucket.head(path))

    def open(self) -> Store:
        return open_store(self._url)


@pytest.fixture(scope="module")
def pool_clients(mooncake: Mooncake) -> Iterator[list[Store]]:
    with closing(open_store(mooncake.url)) as one, closing(open_store(mooncake.url)) as other:
        yield [one, other]


class TestMooncake(StoreSuite):
    """On a real master and two holders. Joining takes a second: who is asked about its end, or for
    what stays after it, joins anew; the others share two."""

    ends = ("closing_it_ends", "those_who_come_later", "tells_a_payload")

    @pytest.fixture(autouse=True)
    def _place(
        self, request: pytest.FixtureRequest, pool_clients: list[Store], mooncake: Mooncake
    ) -> None:
        pool_clients[0].clear(wait=True)
        self._joins_anew = any(part in request.node.name for part in self.ends)
        self._url = mooncake.url
        self._turns = cycle(pool_clients)
        self._others_url = f"{mooncake.url}&prefix=others:"

    def open(self) -> Store:
        if self._joins_anew:
            return open_store(self._url)
        return cast(Store, KeptOpen(next(self._turns)))

    def place_foreign(self) -> Callable[[], bool]:
        with closing(open_store(self._others_url)) as theirs:
            self._put(theirs, 5)

        def is_there() -> bool:
            with closing(open_store(self._others_url)) as theirs:
                return theirs.contains([name(5)], deadline=soon()) == [True]

        return is_there


# ---- stores that break one rule ------------------------------------------------------------------


class Wrong(MemoryStore):
    """Each kind of it forgets one promise."""


class MixesUp(Wrong):
    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        return super().get(list(reversed(names)), into, deadline=deadline)


class AlwaysThere(Wrong):
    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        return [True] * len(names)


class IgnoresShards(Wrong):
    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        alike = [name._replace(component="full", shard=0, num_shards=1) for name in names]
        return super().contains(alike, deadline=deadline)


class RefusesTwice(Wrong):
    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        there = self.contains([new.name for new in objects], deadline=deadline)
        statuses = super().put(objects, deadline=deadline)
        return [PageStatus.REJECTED if t else s for t, s in zip(there, statuses, strict=True)]


class NeedsSomething(Wrong):
    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        assert names[0]
        return super().get(names, into, deadline=deadline)


class Forgets(Wrong):
    def close(self) -> None:
        self.clear()


class TakesAnySize(Wrong):
    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        status = super()._get_one(name, blob)
        return PageStatus.OK if status is PageStatus.CORRUPT else status


class DropsShortOnes(Wrong):
    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        item = self._objects.get(name)
        if item is not None and len(item.data) < blob.header.nbytes + blob.payload.nbytes:
            return PageStatus.CORRUPT
        return super()._get_one(name, blob)


class DropsLongOnes(Wrong):
    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        item = self._objects.get(name)
        if item is not None and len(item.data) > blob.header.nbytes + blob.payload.nbytes:
            return PageStatus.CORRUPT
        return super()._get_one(name, blob)


class WritesInParts(Wrong):
    """Over what is there, and stops half-way."""

    def _put_one(self, new: NewObject) -> PageStatus:
        there = self._objects.get(new.name)
        if there is None:
            return super()._put_one(new)
        data = b"".join(new.blob)
        there.data = data[: len(data) // 2] + there.data[len(data) // 2 :]
        return PageStatus.OK


class TidiesUp(Wrong):
    """It knows the header of a page, and lets go of what it could not read itself."""

    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        status = super()._get_one(name, blob)
        if blob.header[:8] == MAGIC and blob.header[8:12] != b"\1\0\0\0":
            self._drop(name)
        return status


class KeepsOrphans(Wrong):
    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        alone = [NewObject(new.name, new.blob, None, new.used_ns) for new in objects]
        return super().put(alone, deadline=deadline)


class OneAtATime(Wrong):
    """A parent of the same call is not seen."""

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        return list(reversed([super(OneAtATime, self)._put_one(n) for n in reversed(objects)]))


class TouchCreates(Wrong):
    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        for other in names[1:]:
            self._drop(other)


class BreaksAfterDeadline(Wrong):
    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        if deadline < time.monotonic():
            self.clear()
            return [PageStatus.TIMEOUT] * len(names)
        return super().get(names, into, deadline=deadline)


class KeepsDamage(Wrong):
    def quarantine(self, name: ObjectName) -> bool:
        return True


class ScansTwice(Wrong):
    def scan(self) -> Iterator[Any]:
        yield from super().scan()
        yield from super().scan()


class ClearsNothing(Wrong):
    def clear(self, *, wait: bool = False) -> int:
        return 3


class Miscounts(Wrong):
    def stats(self) -> Any:
        return super().stats().__class__(17, 1)


class SharesABuffer(Wrong):
    """Between threads."""

    def _put_one(self, new: NewObject) -> PageStatus:
        self._last = new
        time.sleep(0.001)
        last = self._last
        return super()._put_one(NewObject(new.name, last.blob, last.parent, last.used_ns))


class LandsLate(Wrong):
    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        threading.Timer(0.01, super().get, (names, into), {"deadline": deadline}).start()
        return [PageStatus.TIMEOUT] * len(names)


class HangsAfterItsEnd(Wrong):
    _is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        while self._is_closed and time.monotonic() < deadline - 55:
            time.sleep(0.01)
        return super().get(names, into, deadline=deadline)


class KnowsNoBudget(Wrong):
    """It takes whatever comes."""


class KeepsCopies(Wrong):
    def _get_one(self, name: ObjectName, blob: Blob) -> PageStatus:
        status = super()._get_one(name, blob)
        self.__dict__.setdefault("_copies", []).append(bytes(blob.payload))
        return status


class SaysTooMuch(Wrong):
    def close(self) -> None:
        self._objects = cast(Any, None)

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        if self._objects is None:
            raise OSError(f"could not write {bytes(objects[0].blob.payload)!r}")
        return super().put(objects, deadline=deadline)


class ClearsAll(Wrong):
    theirs = True

    def clear(self, *, wait: bool = False) -> int:
        self.theirs = False
        return super().clear(wait=wait)


BREAKS: dict[type[Wrong], str] = {
    MixesUp: "byte_for_byte",
    AlwaysThere: "never_put_is_a_miss",
    IgnoresShards: "names_that_differ",
    RefusesTwice: "putting_what_is_there",
    NeedsSomething: "nothing_at_all",
    Forgets: "those_who_come_later",
    TakesAnySize: "another_size",
    DropsShortOnes: "of_a_shorter_object",
    DropsLongOnes: "of_a_longer_object",
    WritesInParts: "writers_of_one_name",
    TidiesUp: "later_version_or_another_model",
    KeepsOrphans: "without_the_one_it_needs",
    OneAtATime: "with_the_one_it_needs",
    TouchCreates: "using_a_path",
    BreaksAfterDeadline: "whose_time_is_over",
    KeepsDamage: "damaged_is_taken_out",
    ScansTwice: "scan_finds",
    ClearsNothing: "was_cleared",
    Miscounts: "figures",
    SharesABuffer: "threads_do_not_get",
    HangsAfterItsEnd: "closing_it_ends",
    LandsLate: "when_the_call_has_ended",
    KnowsNoBudget: "keeps_to_its_budget",
    KeepsCopies: "more_and_more_memory",
    SaysTooMuch: "tells_a_payload",
    ClearsAll: "others_keep_there",
}


def rules() -> dict[str, Callable[[StoreSuite], None]]:
    return {n: getattr(StoreSuite, n) for n in vars(StoreSuite) if n.startswith("test_")}


@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_a_store_that_breaks_a_rule_fails_there(kind: type[Wrong]) -> None:
    (rule,) = [test for name, test in rules().items() if BREAKS[kind] in name]
    store = kind()
    suite = StoreSuite()
    suite.hangs_s, suite.lands_late_s = 0.3, 1.0
    suite.open = lambda: store  # type: ignore[method-assign]
    suite.open_small = lambda _: store  # type: ignore[method-assign]
    suite.place_foreign = lambda: lambda: getattr(store, "theirs", True)  # type: ignore[method-assign]
    with pytest.raises((AssertionError, IndexError)):
        rule(suite)


@pytest.mark.parametrize("rule", ["budget", "others_keep_there", "those_who_come_later"])
def test_a_rule_that_cannot_be_looked_at_is_skipped_and_says_why(rule: str) -> None:
    (test,) = [test for name, test in rules().items() if rule in name]
    suite = StoreSuite()
    suite.is_shared = False
    with pytest.raises(SkipTest, match="this store"):
        test(suite)


def test_every_rule_has_a_store_that_breaks_it() -> None:
    assert all(any(part in name for part in BREAKS.values()) for name in rules())
    assert len(BREAKS) == len(rules())
