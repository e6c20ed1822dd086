"""The suite of pages, on tiers of stores and on each codec; and pages that must not pass it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.store.account import StoreHealth
from quire.store.base import Pages, WriteWhen
from quire.store.client import PageStore
from quire.store.codec import object_name
from quire.store.memory import MemoryStore
from quire.store.opening import open_pages
from quire.store.tiers import StoreTier, Tiers
from quire.testing.pages import PagesSuite
from quire.types import PageStatus
from store_servers import Valkey


def plain(store: MemoryStore) -> PageStore:
    return PageStore(store, clock=time.monotonic)


class TestOne(PagesSuite):
    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self._store = MemoryStore()

    def open(self) -> Pages:
        return plain(self._store)


class TestTwo(PagesSuite):
    second = WriteWhen.THROUGH

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self._stores = [MemoryStore(), MemoryStore()]

    def open(self) -> Pages:
        whens = [WriteWhen.THROUGH, self.second]
        tiers = [StoreTier(plain(s), when) for s, when in zip(self._stores, whens, strict=True)]
        return Tiers(tiers, clock=time.monotonic)


class TestOneWrittenLater(TestTwo):
    second = WriteWhen.BACK


class TestOneOnlyRead(TestTwo):
    second = WriteWhen.NEVER


class TestFiles(PagesSuite):
    options = ""

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        for codec, package in (("zstd", "zstandard"), ("lz4", "lz4.block")):
            if codec in self.options:
                pytest.importorskip(package, reason="needs the codecs extra")
        self._url = f"file://{tmp_path}/store?max=1GiB"

    def open(self) -> Pages:
        return open_pages(self._url + self.options, clock=time.monotonic)


class TestZstd(TestFiles):
    options = "&codec=zstd"


class TestLz4(TestFiles):
    options = "&codec=lz4"


class TestServerBeforePackedFiles(TestFiles):
    """A real server before files, which are packed and written later."""

    options = "&codec=zstd&write=back"

    @pytest.fixture(autouse=True)
    def _server(self, valkey: Valkey, _place: None) -> None:
        valkey.say(b"FLUSHALL")
        self._url = f"{valkey.url} {self._url}"


# ---- pages that break one rule -------------------------------------------------------------------


class Wrong(PageStore):
    """Each kind of it forgets one promise."""


class TakesOthersBytes(Wrong):
    """Verifies nothing."""

    def _read(self, part: Any, keys: Any, pages: Any, deadline: float) -> list[PageStatus]:
        names = [object_name(part, key) for key in reversed(keys)]
        return self._store.get(names, self._headers.blobs(pages), deadline=deadline)


class AlwaysThere(Wrong):
    def get(self, part: Any, keys: Any, pages: Any, *, deadline: float) -> list[PageStatus]:
        statuses = super().get(part, keys, pages, deadline=deadline)
        return [PageStatus.OK if s is PageStatus.MISS else s for s in statuses]


class SeesBehindHoles(Wrong):
    def find(self, *args: Any, each: bool = False, **options: Any) -> list[bytes]:
        return super().find(*args, each=True, **options)


class Forgets(Wrong):
    def close(self, timeout_s: float = 5.0) -> None:
        self._store.clear()
        super().close(timeout_s)


class DropsForeign(Wrong):
    def get(self, part: Any, keys: Any, pages: Any, *, deadline: float) -> list[PageStatus]:
        statuses = super().get(part, keys, pages, deadline=deadline)
        for key, status in zip(keys, statuses, strict=True):
            if status is PageStatus.MISS:
                self._store.quarantine(object_name(part, key))
        return statuses


class OneComponent(Wrong):
    def find(self, part: Any, queries: Any, **options: Any) -> list[bytes]:
        return super().find(PagesSuite.part, queries, **options)


class KeepsOrphans(Wrong):
    def put(self, *args: Any, parents: Any = (), **options: Any) -> list[PageStatus]:
        return super().put(*args, **options)


class TouchDrops(Wrong):
    def touch(self, part: Any, keys: Any, **_: Any) -> None:
        for key in keys:
            self._store.quarantine(object_name(part, key))


class NoDeadline(Wrong):
    def get(self, part: Any, keys: Any, pages: Any, *, deadline: float) -> list[PageStatus]:
        return super().get(part, keys, pages, deadline=time.monotonic() + 60)


class ClearsNothing(Wrong):
    def clear(self) -> None: ...


class GoesOn(Wrong):
    def close(self, timeout_s: float = 5.0) -> None: ...


class SharesABuffer(Wrong):
    """Between threads."""

    def get(self, part: Any, keys: Any, pages: Any, *, deadline: float) -> list[PageStatus]:
        self._last = keys
        time.sleep(0.001)
        return super().get(part, self._last, pages, deadline=deadline)

    def _verify(
        self, part: Any, key: Any, blob: Any, status: PageStatus, deadline: float
    ) -> PageStatus:
        return status


class CountsNothing(Wrong):
    def counters(self) -> dict[str, int]:
        return {"read:ok": 0, "written:ok": 0}


class SaysNothingOfItself(Wrong):
    def health(self) -> list[StoreHealth]:
        return []


BREAKS: dict[type[Wrong], str] = {
    TakesOthersBytes: "byte_for_byte",
    AlwaysThere: "never_put_is_a_miss",
    SeesBehindHoles: "before_a_hole",
    Forgets: "opens_it_next",
    DropsForeign: "of_another_model",
    OneComponent: "other_components",
    KeepsOrphans: "is_an_orphan",
    TouchDrops: "using_pages",
    NoDeadline: "whose_time_is_over",
    ClearsNothing: "was_cleared",
    GoesOn: "after_the_end",
    SharesABuffer: "threads_do_not_get",
    CountsNothing: "is_counted",
    SaysNothingOfItself: "how_each_store_stands",
}


def rules() -> dict[str, Callable[[PagesSuite], None]]:
    return {n: getattr(PagesSuite, n) for n in vars(PagesSuite) if n.startswith("test_")}


@pytest.mark.parametrize("kind", BREAKS, ids=lambda kind: kind.__name__)
def test_pages_that_break_a_rule_fail_there(kind: type[Wrong]) -> None:
    (rule,) = [test for name, test in rules().items() if BREAKS[kind] in name]
    store = MemoryStore()
    suite = PagesSuite()
    suite.open = lambda: kind(store, clock=time.monotonic)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        rule(suite)


def test_every_rule_has_pages_that_break_it() -> None:
    assert all(any(part in name for part in BREAKS.values()) for name in rules())
    assert len(BREAKS) == len(rules())
