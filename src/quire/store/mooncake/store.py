"""MooncakeStore: what each call of a store asks of a pool of memory.

    page    PREFIX NAME      put once, never changed; its holder or holders are the pool's choice

The master says what is where, holders hold it, and bytes move between them and this process's host
pages. When the pool is full the master drops what was not asked for longest, in the background, so
a put that finds no room is tried again. When a holder dies the master believes in it for some
seconds: what could not be read from it is a miss, and is not believed in here for as long.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import not_
from typing import NamedTuple

from quire.errors import StoreError, StoreURLError
from quire.store.base import MAX_BYTES, Blob, NewObject, ObjectName, StoredObject, StoreStats
from quire.store.counters import StoreCounters
from quire.store.lately import just_made
from quire.store.mooncake.master import Master
from quire.store.mooncake.pool import (
    EXISTS,
    GONE,
    NO_ANSWER,
    NO_ROOM,
    OTHER_SIZE,
    TRANSFER_FAILED,
    Bytes,
    Pool,
    PoolSettings,
)
from quire.store.mooncake.registration import Memory, StagingArea
from quire.store.paths import Sent, put_paths
from quire.store.url import Options, StoreURL, whole_number
from quire.types import PageStatus

DEFAULT_PORT, METRICS_PORT = 50051, 9003
PUT_TRIES, PUT_PAUSE_S = 4, 0.05
LOST_S = 12.0
"""How long a master believes in a holder that is gone, and a little more."""
MAX_LOST = 1 << 16


class MooncakeStore:
    def __init__(
        self,
        pool: Pool,
        master: Master,
        *,
        prefix: str = "quire:",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pool = pool
        self._master = master
        self._prefix = prefix
        self._sleep = sleep
        self._memory = Memory(pool.register, pool.unregister)
        self._lock = threading.Lock()
        self._lost: dict[str, float] = {}
        """Keys whose holder did not answer, and until when they count as not there."""
        self._made = just_made()
        self._counters = StoreCounters("retried_puts", "lost_objects")

    # ---- pages ----------------------------------------------------------------------------------

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """In one question to the master, which also counts as use."""
        if not names:
            return []
        _in_time(deadline)
        keys = [self._key(name) for name in names]
        answers = self._pool.exists(keys)
        if any(answer < 0 for answer in answers):
            raise TimeoutError if NO_ANSWER in answers else StoreError("the master does not answer")
        lost = self._known_as_lost()
        there = [a == 1 and key not in lost for key, a in zip(keys, answers, strict=True)]
        self._made.discard(compress(names, map(not_, there)))
        return there

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        if not names or time.monotonic() >= deadline:
            return [PageStatus.TIMEOUT] * len(names)
        with self._memory.stage(self._memory.staged_bytes(into)) as stage:
            landing = [_Placed(self._memory, stage, blob) for blob in into]
            objects = [
                Bytes(self._key(name), placed.addresses, placed.sizes)
                for name, placed in zip(names, landing, strict=True)
            ]
            codes = self._pool.get(objects)
            statuses = [self._read(*each, deadline) for each in zip(objects, codes, strict=True)]
            for placed, status in zip(landing, statuses, strict=True):
                if status in (PageStatus.OK, PageStatus.CORRUPT):
                    placed.copy_out()
        for i, code in enumerate(codes):
            if code == OTHER_SIZE and statuses[i] is PageStatus.CORRUPT:
                statuses[i] = self._read_header(objects[i], into[i].header, deadline)
        return statuses

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        def send(news: Sequence[NewObject], needed: Sequence[ObjectName]) -> Sent:
            asked = [name for name in needed if name not in self._made]
            try:
                said = dict(zip(asked, self.contains(asked, deadline=deadline), strict=True))
            except (TimeoutError, StoreError) as error:
                late = isinstance(error, TimeoutError)
                failed = PageStatus.TIMEOUT if late else PageStatus.FAILED
                return Sent([failed] * len(news), [failed] * len(needed))
            return Sent(publish(news), [said.get(name, True) for name in needed])

        def publish(news: Sequence[NewObject]) -> list[PageStatus]:
            if not news or time.monotonic() >= deadline:
                return [PageStatus.TIMEOUT] * len(news)
            blobs = [new.blob for new in news]
            with self._memory.stage(self._memory.staged_bytes(blobs)) as stage:
                leaving = []
                for new, blob in zip(news, blobs, strict=True):
                    placed = _Placed(self._memory, stage, blob)
                    placed.copy_in()
                    leaving.append(Bytes(self._key(new.name), placed.addresses, placed.sizes))
                codes = self._send(leaving, deadline)
            self._made.add(new.name for new, code in zip(news, codes, strict=True) if code == 0)
            return [_written(code) for code in codes]

        def take_back(names: Sequence[ObjectName]) -> None:
            self._made.discard(names)
            self._pool.remove([self._key(name) for name in names])

        return put_paths(objects, send=send, take_back=take_back)

    def has_made(self, name: ObjectName) -> bool:
        """See Making."""
        return name in self._made

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        """To be asked for is to be used. What lies behind a hole is kept fresh with the rest."""
        if names:
            self._pool.exists([self._key(name) for name in names])

    def quarantine(self, name: ObjectName) -> bool:
        """Memory keeps nothing for a person to look at: the object is dropped."""
        self._made.discard([name])
        (code,) = self._pool.remove([self._key(name)])
        if code and code not in GONE:
            raise StoreError(f"the pool did not drop an object (code {code}): look at its master")
        return code == 0

    # ---- for people -----------------------------------------------------------------------------

    def scan(self) -> Iterator[StoredObject]:
        """The pool does not say when something was used."""
        now = time.time()
        for key in self._master.all_keys():
            name = ObjectName.parse(key[len(self._prefix) :])
            size = self._pool.size(key) if name is not None and self._key(name) == key else 0
            if name is not None and size > 0:
                yield StoredObject(name, size, now)

    def clear(self, *, wait: bool = False) -> int:
        name = r"[0-9a-f]{64}\.[a-z0-9_-]{1,32}\.[0-9]{1,6}of[0-9]{1,6}"
        removed = self._pool.remove_matching(f"^{re.escape(self._prefix)}{name}$")
        if removed < 0:
            raise StoreError(f"the pool could not be cleared (code {removed}): look at its master")
        self._made.clear()
        return removed

    def stats(self) -> StoreStats:
        return self._master.stats()

    def counts(self) -> dict[str, int]:
        return self._counters.snapshot()

    def close(self) -> None:
        self._pool.close()

    # ---- inside ---------------------------------------------------------------------------------

    def _key(self, name: ObjectName) -> str:
        return self._prefix + name.text

    def _send(self, leaving: Sequence[Bytes], deadline: float) -> list[int]:
        """Codes. Room is made, and the dead are noticed, while one waits a little."""
        codes = self._pool.put(leaving)
        for tried in range(1, PUT_TRIES):
            again = [i for i, code in enumerate(codes) if code in (NO_ROOM, TRANSFER_FAILED)]
            pause_s = PUT_PAUSE_S * tried
            if not again or time.monotonic() + pause_s >= deadline:
                break
            self._sleep(pause_s)
            self._counters.add({"retried_puts": len(again)})
            for i, code in zip(again, self._pool.put([leaving[i] for i in again]), strict=True):
                codes[i] = code
        return codes

    def _read(self, wanted: Bytes, code: int, deadline: float) -> PageStatus:
        if code == sum(wanted.sizes):
            return PageStatus.OK
        if code in (TRANSFER_FAILED, OTHER_SIZE):
            size = self._pool.size(wanted.key)
            room = sum(wanted.sizes)
            if 0 < size < room:  # to be asked for by its very size
                if time.monotonic() >= deadline:  # each takes a second if its holder is gone
                    return PageStatus.TIMEOUT
                (code,) = self._pool.get([wanted.cut(size)])
            if code == size or (code == OTHER_SIZE and size > room):
                return PageStatus.CORRUPT
            self._lose(wanted.key)
            return PageStatus.MISS
        if code in GONE:
            return PageStatus.MISS
        return PageStatus.TIMEOUT if code == NO_ANSWER else PageStatus.FAILED

    def _read_header(self, wanted: Bytes, header: memoryview, deadline: float) -> PageStatus:
        """Of an object that is larger than was asked for, and of which the pool gives all or
        nothing. CORRUPT: its header is there to be looked at, if it has one; else it is left alone.
        """
        if time.monotonic() >= deadline:
            return PageStatus.TIMEOUT
        size = self._pool.size(wanted.key)
        if size <= sum(wanted.sizes):
            return PageStatus.CORRUPT
        if size > sum(wanted.sizes) + MAX_BYTES:  # more than a call moves, for one header
            return PageStatus.MISS
        with self._memory.stage(size) as stage:
            view, where = stage.take(size)
            if self._pool.get([Bytes(wanted.key, [where], [size])]) != [size]:
                return PageStatus.MISS
            header[:] = view[: header.nbytes]
        return PageStatus.CORRUPT

    def _lose(self, key: str) -> None:
        self._counters.count("lost_objects")
        name = ObjectName.parse(key[len(self._prefix) :])
        self._made.discard([] if name is None else [name])
        with self._lock:
            self._lost.pop(key, None)  # those that come back first come first
            while len(self._lost) >= MAX_LOST:
                del self._lost[next(iter(self._lost))]
            self._lost[key] = time.monotonic() + LOST_S

    def _known_as_lost(self) -> set[str]:
        with self._lock:
            now = time.monotonic()
            while self._lost and (oldest := next(iter(self._lost))) and self._lost[oldest] <= now:
                del self._lost[oldest]
            return set(self._lost) if self._lost else set()


class _Placed:
    """An object's header and page, each in place or on the stage."""

    def __init__(self, memory: Memory, stage: StagingArea, blob: Blob) -> None:
        self._staged: list[tuple[memoryview, memoryview]] = []
        self.addresses: list[int] = []
        self.sizes = [piece.nbytes for piece in blob]
        for piece in blob:
            where = memory.in_place(piece)
            if where is None:
                copy, where = stage.take(piece.nbytes)
                self._staged.append((piece, copy))
            self.addresses.append(where)

    def copy_in(self) -> None:
        for piece, copy in self._staged:
            copy[:] = piece

    def copy_out(self) -> None:
        for piece, copy in self._staged:
            piece[:] = copy


def _written(code: int) -> PageStatus:
    if code in (0, EXISTS):
        return PageStatus.OK
    if code == NO_ROOM:
        return PageStatus.REJECTED
    return PageStatus.TIMEOUT if code == NO_ANSWER else PageStatus.FAILED


def _in_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError("too late to ask")


# ---- by URL --------------------------------------------------------------------------------------


def open_url(url: StoreURL) -> MooncakeStore:
    """`mooncake://master:50051?segment=4GiB&replicas=2`; see docs/stores.md for the others."""
    place = read_url(url)
    return MooncakeStore(Pool(place.settings), Master(place.metrics), prefix=place.prefix)


class PoolURL(NamedTuple):
    """What a URL says."""

    settings: PoolSettings
    prefix: str
    metrics: str


def read_url(url: StoreURL) -> PoolURL:
    options = Options(url)
    host, port = _host(url)
    settings = PoolSettings(
        master=f"{host}:{port}",
        local=options.text("local", ""),
        metadata=options.text("metadata", "P2PHANDSHAKE"),
        protocol=options.text("protocol", "tcp"),
        devices=options.text("devices", ""),
        segment_bytes=options.size("segment", 0),
        replicas=options.integer("replicas", 1),
    )
    prefix = options.text("prefix", "quire:")
    metrics = options.text("metrics", f"{host}:{METRICS_PORT}")
    options.finish()
    if settings.protocol not in ("tcp", "rdma"):
        raise StoreURLError(f"option 'protocol' in {url.shown!r} must be tcp or rdma")
    if not settings.replicas:
        raise StoreURLError(f"option 'replicas' in {url.shown!r} must be 1 or more")
    if not prefix or not prefix.isascii() or not prefix.isprintable() or " " in prefix:
        raise StoreURLError(
            f"option 'prefix' in {url.shown!r} must be of printable ASCII without spaces"
        )
    settings = settings._replace(local=settings.local or _own_host(host, port))
    return PoolURL(settings, prefix, metrics)


def _host(url: StoreURL) -> tuple[str, int]:
    host, colon, port = url.host.partition(":")
    number = whole_number(port) if colon else DEFAULT_PORT
    names_one = host and "@" not in host and url.path in ("", "/")
    if not names_one or number is None or not 0 < number < 1 << 16:
        raise StoreURLError(
            f"{url.shown!r} names no master: write mooncake://host:{DEFAULT_PORT}?replicas=1"
        )
    return host, number


def _own_host(host: str, port: int) -> str:
    """Our address on the way to the master: holders reach us by it. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise StoreError(f"{host} cannot be found ({error}): check the store's URL") from None
