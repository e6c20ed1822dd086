"""Helpers for store tests: parts, keys and pages by intent."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from quire.store.base import HEADER_BYTES, Part, Store, WriteWhen
from quire.store.client import PageStore
from quire.store.codec import object_name
from quire.store.file import FileStore
from quire.store.opening import choice_in, without_page_options
from quire.store.packing import PackKind
from quire.store.url import opener_of, parse_url, split_urls
from quire.types import NO_PARENT, Owner, PageKey, PageStatus
from store_servers import Mooncake, Moto, Valkey, clustered

PAGE_BYTES = 2 * HEADER_BYTES


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def soon() -> float:
    return time.monotonic() + 60


def counted(store: PageStore, what: str) -> dict[str, int]:
    """Of what was counted: by reason."""
    counters = store.counters().items()
    return {name.partition(":")[2]: n for name, n in counters if name.startswith(f"{what}:")}


class Pages:
    """Content derived from the key's number, so that a wrong page is seen as wrong."""

    part = Part("full", 0, 1, b"f" * 32, PAGE_BYTES)
    object_bytes = PAGE_BYTES + HEADER_BYTES

    def key(self, n: int) -> PageKey:
        return PageKey(n.to_bytes(4, "little") * 8)

    def keys(self, *numbers: int) -> list[PageKey]:
        return [self.key(n) for n in numbers]

    def put(self, store: PageStore, *numbers: int, deadline: float = 0) -> list[PageStatus]:
        sources = [self.full(n) for n in numbers]
        return store.put(self.part, self.keys(*numbers), sources, deadline=deadline or soon())

    def put_path(
        self,
        store: PageStore,
        *numbers: int,
        after: int = 0,
        owner: Owner | None = None,
        used_ns: int | None = None,
    ) -> list[PageStatus]:
        """Each page behind the one before it, the first behind `after` (0: the first of all)."""
        sources = [self.full(n) for n in numbers]
        parents = [self.key(n) if n else NO_PARENT for n in (after, *numbers[:-1])]
        keys, owners = self.keys(*numbers), [owner] * len(numbers)
        return store.put(
            self.part,
            keys,
            sources,
            parents=parents,
            owners=owners,
            used_ns=used_ns,
            deadline=soon(),
        )

    def usable(self, store: PageStore, *numbers: int) -> int:
        """How many pages of a path would be found."""
        return sum(store.find(self.part, [self.keys(*numbers)], deadline=soon())[0])

    def there(self, store: PageStore, *numbers: int) -> list[int]:
        """Those that the store has; asking does not count as use."""
        names = [object_name(self.part, key) for key in self.keys(*numbers)]
        present = store._store.contains(names, deadline=soon())
        return [n for n, is_there in zip(numbers, present, strict=True) if is_there]

    def get(self, store: PageStore, *numbers: int, deadline: float = 0) -> list[PageStatus]:
        """Statuses; also proves that whatever is OK is right. What came counts as used."""
        into, keys = [self.empty() for _ in numbers], self.keys(*numbers)
        statuses = store.get(self.part, keys, into, deadline=deadline or soon())
        num_came = len(list(takewhile(lambda status: status is PageStatus.OK, statuses)))
        store.touch(self.part, keys[:num_came])
        for n, status, page in zip(numbers, statuses, into, strict=True):
            assert status is not PageStatus.OK or page == self.full(n)
        return statuses

    def full(self, n: int) -> memoryview:
        view = self.empty()
        view[:] = n.to_bytes(4, "big") * (PAGE_BYTES // 4)
        return view

    def empty(self) -> memoryview:
        return memoryview(mmap.mmap(-1, PAGE_BYTES))


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def deadline() -> float:
    return time.monotonic() + 60


@pytest.fixture
def client() -> Iterator[Callable[..., PageStore]]:
    """Makes PageStores and closes them."""
    made: list[PageStore] = []

    def make(store: Store, **options: Any) -> PageStore:
        made.append(PageStore(store, **{"clock": time.monotonic, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Read(Exception):
    """A URL was, to its end; what it names would be opened now."""


@pytest.fixture
def read_as_stores_do(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Every URL, by what opens it, without anything being opened, joined or asked."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")

    def is_read(*_: object, **__: object) -> None:
        raise Read

    for place in ("file.store.FileStore", "redis.store.Nodes", "mooncake.store.Pool"):
        monkeypatch.setattr(f"quire.store.{place}", is_read)
    monkeypatch.setattr("quire.store.mooncake.store._own_host", lambda *_: "here")

    def read(text: str) -> None:
        for url in split_urls(text):
            choice_in(url, "write", WriteWhen.THROUGH)
            choice_in(url, "codec", PackKind.NONE)
            plain = parse_url(without_page_options(url))
            if plain.scheme in ("s3", "gs", "az"):
                pytest.importorskip("obstore", reason="needs the packages of the s3 extra")
                monkeypatch.setattr("quire.store.bucket.BucketStore", is_read)
            with pytest.raises(Read):
                opener_of(plain)(plain)

    return read


class FileStores:
    """Makes FileStores on one directory, already scanned."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[FileStore] = []

    def __call__(self, **options: Any) -> FileStore:
        self.made.append(FileStore(self.root, **{"reserve_bytes": 0, **options}))
        assert self.made[-1].wait_scanned(30)
        return self.made[-1]

    def object_files(self) -> list[Path]:
        return sorted(path for path in (self.root / "objects").rglob("*") if path.is_file())

    def quarantined_files(self) -> list[Path]:
        return list((self.root / "quarantine").iterdir())

    def damage(self, key: PageKey, offset: int) -> None:
        (path,) = (self.root / "objects").rglob(f"{key.hex()}*")
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[FileStores]:
    stores = FileStores(tmp_path / "store")
    yield stores
    for store in stores.made:
        store.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Valkey]]:
    """Two servers with half of the slots each."""
    with clustered(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    """A test double."""
    for package in ("moto", "flask_cors", "obstore"):
        pytest.importorskip(package, reason=f"no {package} here: pip install 'quire[dev]'")
    server = Moto(tmp_path_factory.mktemp("moto"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A master and two holders."""
    pool = Mooncake(tmp_path_factory.mktemp("mooncake"))
    yield pool
    pool.stop()
