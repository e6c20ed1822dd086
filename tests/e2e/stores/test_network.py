"""Stores at the other end of a real link (a network namespace, a veth pair) that is cut, narrow, or
on which everything gets lost and nobody is told, while requests run. Needs root; skipped without.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.disagg.netns import Home, Link, Network, why_no_shaping, why_not
from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import TINY_LLAMA
from e2e.stores.test_faults import (
    OPTIONS,
    ask,
    asked_until_it_opens,
    from_the_store,
    meanwhile,
    used_again,
)
from quire.store import open_store
from quire.store.base import HEADER_BYTES, MAX_OBJECTS, Blob, NewObject
from quire.testing.stores import name, soon
from quire.types import PageStatus, Tier
from store_servers import Mooncake, Moto, Valkey

KBIT_S = 4_000
CALLS, PAGE_BYTES, OURS = 8, 1 << 20, 0xEE


class Break(NamedTuple):
    harm: Callable[[Link], None]
    undo: Callable[[Link], None]
    is_silence: bool = True
    """Nobody answers: the breaker must open."""


BREAKS = {
    "cut": Break(Link.cut, Link.mend),
    "lost": Break(Link.stall, Link.go_on),
    "shaped": Break(lambda link: link.shape(KBIT_S), Link.widen, is_silence=False),
}


class Far(NamedTuple):
    """A store on a server in another network."""

    link: Link
    url: str


def _redis(folder: Path, host: str) -> tuple[Valkey, str]:
    server = Valkey(folder, bind="0.0.0.0", protected_mode="no")
    return server, f"redis://{host}:{server.port}"


def _s3(folder: Path, host: str) -> tuple[Moto, str]:
    server = Moto(folder, bind="0.0.0.0")
    return server, server.url.replace("127.0.0.1", host)


def _mooncake(folder: Path, host: str) -> tuple[Mooncake, str]:
    server = Mooncake(folder, host=host)
    return server, server.url


SERVERS = {"redis": _redis, "s3": _s3, "mooncake": _mooncake}


@pytest.fixture
def far(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Far]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    if reason := why_not() or why_no_shaping():
        pytest.skip(reason)
    if request.param == "s3":
        for package in ("moto", "flask_cors", "obstore"):
            pytest.importorskip(package, reason=f"no {package} here: pip install 'quire[dev]'")
    with Network() as there:
        link = Link(Home(), there)
        with there.inside():
            server, url = SERVERS[request.param](tmp_path, link.right)
        try:
            yield Far(link, url)
        finally:
            server.stop()


@pytest.mark.long
@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("far", SERVERS, indirect=True)
def test_a_link_that_breaks_costs_hits_and_nothing_else_c18(far: Far, how: str) -> None:
    harm, undo, is_silence = BREAKS[how]
    with engine_rig(TINY_LLAMA, store=far.url, **OPTIONS) as rig:
        ask(rig, "before")
        assert from_the_store(rig)
        meanwhile(lambda: harm(far.link), lambda: ask(rig, f"while it is {how}"))
        rig.flush(Tier.DEVICE, Tier.HOST)
        ask(rig, f"while it is {how}, from the store if it can")
        if is_silence:
            asked_until_it_opens(rig)
        undo(far.link)
        used_again(rig)
        rig.settle()


@pytest.mark.long
def test_a_pool_far_away_writes_into_no_page_that_it_has_given_back(tmp_path: Path) -> None:
    """So much is read at once that most of it is given up; then the link is wide again."""
    if reason := why_not() or why_no_shaping():
        pytest.skip(reason)
    memory = memoryview(mmap.mmap(-1, CALLS * MAX_OBJECTS * PAGE_BYTES))
    pages = [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]
    blobs = [Blob(memoryview(bytearray(HEADER_BYTES)), page) for page in pages]
    names = [name(n) for n in range(len(pages))]
    parts = [slice(at, at + MAX_OBJECTS) for at in range(0, len(pages), MAX_OBJECTS)]
    with Network() as there:
        link = Link(Home(), there)
        with there.inside():
            pool = Mooncake(tmp_path, host=link.right, holder_bytes=512 << 20, holders=1)
        try:
            with closing(open_store(pool.url)) as store:

                def read(part: slice) -> None:
                    deadline = time.monotonic() + 5
                    store.get(names[part], blobs[part], deadline=deadline)
                    for page in pages[part]:
                        page[:] = bytes([OURS]) * PAGE_BYTES

                for part in parts:
                    each = zip(names[part], blobs[part], strict=True)
                    news = [NewObject(*one, None, 1) for one in each]
                    assert set(store.put(news, deadline=soon())) == {PageStatus.OK}
                link.shape(KBIT_S)
                with ThreadPoolExecutor(CALLS) as threads:
                    list(threads.map(read, parts))
                link.widen()
                time.sleep(20)
                assert all(page == bytes([OURS]) * PAGE_BYTES for page in pages)
                assert store.contains(names[:1], deadline=soon()) == [True]
        finally:
            pool.stop()
