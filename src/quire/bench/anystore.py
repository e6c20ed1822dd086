"""`quire store bench`: any store, checksums on, beside its own client on the same bytes.

Works in a place of its own inside the store (another prefix or folder), which is cleared
afterwards; nothing else is touched. The store is driven as a worker drives it: as many calling
threads and pages per call, each thread writing one path, which it goes on with from call to call.
Its client moves as many objects of the same bytes, by as many threads and calls, from and to as
many host pages: fewer, which stay in the processor's cache, would flatter it. What was written is
read in random order. Every round times store and client next to each other, each in an empty place:
who writes beside what is there already may find no memory left that the server has at hand, and is
half as fast. Only files stay until the end: deleting them costs the disk work that would fall into
somebody's measurement. Who goes first alternates, and of two rounds one ratio is made: what being
first is worth falls out of it.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from quire.bench.raw import RawBucket, RawClient, RawDisk, RawPool, RawRedis, join_pool
from quire.bench.stats import percentile
from quire.errors import StoreError
from quire.progress import Count
from quire.sizes import format_bytes
from quire.store.base import Part, Store, pages_per_call
from quire.store.client import PageStore
from quire.store.codec import object_name
from quire.store.maintenance import opened
from quire.store.opening import choice_in, is_only_read, without_page_options
from quire.store.packing import Packer, PackKind
from quire.store.url import StoreURL, opener_of, parse_url, split_urls
from quire.types import NO_PARENT, PageKey, PageStatus
from quire.worker.config import IoLimits

LIMITS = IoLimits()
"""As a worker has them: threads that call the store, and pages per call."""
CALLERS = max(LIMITS.fetch_threads, LIMITS.write_threads)
DEADLINE_S = 120.0
PROBE_KEYS = 256
_PROBES = 9
SPARE_BYTES = 1 << 30
"""Of a disk, that measuring leaves free."""
_AMOUNTS = {"read_bytes", "written_bytes", "skipped_pages", "probed_pages", "probe_hits"}
"""Counters that say how much, not what went wrong."""

RawClients = AbstractContextManager[list[RawClient]]
_Move = Callable[[Sequence[PageKey]], float]
"""Moves the pages; how long it took, in seconds."""


class ProbeTimes(NamedTuple):
    one_s: float
    """To ask for one page."""
    many_s: float
    """To ask for PROBE_KEYS."""


def own_place(text: str) -> StoreURL:
    """The same store, but a place in it that nobody else uses. Raises StoreError."""
    given = split_urls(text)
    if len(given) > 1:
        several = " ".join(url.shown for url in given)
        raise StoreError(f"{several!r} are several stores: measure one after the other")
    if is_only_read(given[0]):
        raise StoreError(
            f"{given[0].shown!r} is only read, and measuring writes: give it without write=never"
        )
    url = parse_url(without_page_options(given[0]))
    label = f"quire-bench-{random.SystemRandom().randbytes(6).hex()}"
    if url.scheme in ("redis", "rediss", "mooncake"):
        rest = url.without_options(url.scheme, {"prefix"})
        sign = "&" if "?" in rest else "?"
        # Behind the store's own: a user of Redis may have no right to other keys.
        above = "" if url.scheme == "mooncake" else url.options.get("prefix", "quire:")
        return parse_url(f"{rest}{sign}{urlencode({'prefix': f'{above}{label}:'}, safe=':')}")
    base, question, options = url.text.partition("?")
    inside = f"{url.scheme}://{base.partition('://')[2].rstrip('/')}/{label}"
    if url.scheme in ("s3", "gs", "az"):
        return parse_url(f"{inside}{question}{options}")
    if url.scheme == "file":  # with a budget for which nothing that was written must go
        ample = urlencode({**url.options, "max": 1 << 50, "reserve": 0})
        return parse_url(f"{inside}?{ample}")
    if url.scheme == "memory":
        return parse_url("memory://?max=4GiB")
    opener_of(url)  # if nobody knows it, that is what is to be said
    raise StoreError(
        f"{url.scheme}:// has no place where measuring would leave others alone: measure the store "
        "that it stands for"
    )


class _Call(NamedTuple):
    keys: Sequence[PageKey]
    pages: Sequence[memoryview]
    deadline: float


class Measured:
    """A store in a place of its own, opened, with pages to move."""

    def __init__(
        self, url: StoreURL, store: Store, page_bytes: int, kind: PackKind, *, seed: int = 0
    ) -> None:
        self.url = url
        self.page_bytes = page_bytes
        self._backend = store
        packer = None if kind is PackKind.NONE else Packer(kind)
        self._store = PageStore(store, clock=time.monotonic, packer=packer)
        self._part = Part("full", 0, 1, bytes(32), page_bytes)
        self._random = random.Random(seed)
        # One mapping, as a host pool is: those who register memory register it once.
        self._per_call = min(LIMITS.batch_pages, pages_per_call(page_bytes))
        self.memory = memoryview(mmap.mmap(-1, CALLERS * self._per_call * page_bytes))
        self.pages = [
            self.memory[at : at + page_bytes] for at in range(0, self.memory.nbytes, page_bytes)
        ]
        noise = self._random.randbytes(page_bytes)
        for page in self.pages:
            page[:] = noise

    def keys(self, count: int) -> list[PageKey]:
        return [PageKey(self._random.randbytes(32)) for _ in range(count)]

    def shuffled(self, keys: Sequence[PageKey]) -> list[PageKey]:
        return self._random.sample(keys, len(keys))

    def write(self, keys: Sequence[PageKey], threads: int = LIMITS.write_threads) -> float:
        """Seconds. Raises StoreError."""

        def put(batches: Iterator[_Call]) -> None:
            last = NO_PARENT
            for names, pages, deadline in batches:
                parents, last = [last, *names[:-1]], names[-1]
                self._expect_ok(
                    self._store.put(self._part, names, pages, parents=parents, deadline=deadline)
                )

        return self._timed(keys, threads, put)

    def read(self, keys: Sequence[PageKey], threads: int = LIMITS.fetch_threads) -> float:
        def get(batches: Iterator[_Call]) -> None:
            for names, pages, deadline in batches:
                self._expect_ok(self._store.get(self._part, names, pages, deadline=deadline))

        return self._timed(keys, threads, get)

    def raw(
        self, clients: Sequence[RawClient], keys: Sequence[PageKey], *, puts: bool = False
    ) -> float:
        def work(caller: int) -> None:
            pages = self._pages_of(caller)
            for batch in _batches(keys, self._per_call)[caller :: len(clients)]:
                names = [object_name(self._part, key) for key in batch]
                move = clients[caller].put if puts else clients[caller].get
                move(names, pages[: len(batch)])

        began_s = time.perf_counter()
        parallel(work, len(clients))
        return time.perf_counter() - began_s

    def probe(self, known: Sequence[PageKey]) -> ProbeTimes:
        """Of pages that are there, as many as are known, and others."""
        many = [*known, *self.keys(PROBE_KEYS)][:PROBE_KEYS]
        return ProbeTimes(self._asked(many[:1]), self._asked(many))

    def clear(self) -> None:
        self._backend.clear(wait=True)

    @property
    def is_on_disk(self) -> bool:
        return self.url.scheme == "file"

    def settle(self) -> None:
        """Or writing back metadata of files falls into what comes next."""
        if self.is_on_disk:
            os.sync()

    def empty(self) -> None:
        """For who comes next."""
        if not self.is_on_disk:
            self.clear()

    def _asked(self, keys: Sequence[PageKey]) -> float:
        names = [object_name(self._part, key) for key in keys]
        samples = []
        for _ in range(_PROBES):
            began_s = time.perf_counter()
            self._backend.contains(names, deadline=time.monotonic() + DEADLINE_S)
            samples.append(time.perf_counter() - began_s)
        return statistics.median(samples)

    def _timed(
        self, keys: Sequence[PageKey], threads: int, move: Callable[[Iterator[_Call]], None]
    ) -> float:
        def work(caller: int) -> None:
            pages = self._pages_of(caller)
            move(
                _Call(batch, pages[: len(batch)], time.monotonic() + DEADLINE_S)
                for batch in _batches(keys, self._per_call)[caller::threads]
            )

        began_s = time.perf_counter()
        parallel(work, threads)
        return time.perf_counter() - began_s

    def _pages_of(self, caller: int) -> list[memoryview]:
        size = self._per_call
        return self.pages[caller * size : (caller + 1) * size]

    def _expect_ok(self, statuses: Sequence[PageStatus]) -> None:
        if all(status is PageStatus.OK for status in statuses):
            return
        counted = self._store.counters().items()
        seen = {name: count for name, count in counted if count and not name.endswith(":ok")}
        why = ", ".join(f"{name} {seen[name]}" for name in sorted(seen.keys() - _AMOUNTS))
        raise StoreError(
            f"the store did not move every page ({why}): give it room or a quieter machine, or "
            "measure with a smaller --total"
        )


def parallel(work: Callable[[int], None], num_threads: int) -> None:
    """Run `work(i)` on threads of its own; raises what the first of them raised."""
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))


def summary(
    page_bytes: int, samples: list[dict[str, float]], *, raw: bool = True
) -> dict[str, Any]:
    """Rates in GB/s; without `raw` there is nothing to compare with."""
    entry: dict[str, Any] = {"page_bytes": page_bytes}
    for way in ("write", "read"):
        entry[way] = {"store_gb_s": statistics.median(sample[f"store_{way}"] for sample in samples)}
        if raw:
            ratios = _paired([sample[f"store_{way}"] / sample[f"raw_{way}"] for sample in samples])
            entry[way] |= {
                "raw_gb_s": statistics.median(sample[f"raw_{way}"] for sample in samples),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [percentile(ratios, share) for share in (0.25, 0.75)],
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
    return entry


def _batches(keys: Sequence[PageKey], size: int) -> list[Sequence[PageKey]]:
    return [keys[i : i + size] for i in range(0, len(keys), size)]


@contextmanager
def measured(text: str, page_bytes: int) -> Iterator[Measured]:
    """Cleared and closed afterwards, whatever happens. Raises StoreError."""
    url = own_place(text)
    kind = choice_in(parse_url(text), "codec", PackKind.NONE)
    try:
        with opened(url.text, must_exist=False) as store:
            bench = Measured(url, store, page_bytes, kind)
            try:
                yield bench
            finally:
                bench.clear()
    finally:
        if url.scheme == "file":
            shutil.rmtree(url.path, ignore_errors=True)


@contextmanager
def raw_clients(bench: Measured, size_bytes: int) -> Iterator[list[RawClient]]:
    """One for each thread; none, for a store that has no client of its own here. `size_bytes`: of
    all that they will write."""
    url, clients = bench.url, []
    with ExitStack() as stack:
        if bench.is_on_disk:
            _check_room(url.path, 2 * size_bytes + SPARE_BYTES)
            yield [stack.enter_context(closing(RawDisk(Path(url.path), size_bytes)))] * CALLERS
            return
        shared = None
        if url.scheme == "mooncake":
            shared = join_pool(url, bench.memory)
            stack.callback(shared[0].close)
        for _ in range(CALLERS):
            client: RawClient | None = None
            if RawRedis.serves(url):
                client = RawRedis(url)
            elif url.scheme in ("s3", "gs", "az"):
                client = RawBucket(url)
            elif shared is not None:
                client = RawPool(url, shared)
            if client is not None:
                stack.callback(client.close)
                clients.append(client)
        yield clients


def _check_room(path: str, size_bytes: int) -> None:
    disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize < size_bytes:
        raise StoreError(
            f"the benchmark needs {format_bytes(size_bytes)} free at {path!r}: "
            "give another path or a smaller --total"
        )


def run(
    text: str,
    *,
    page_bytes: int,
    total_bytes: int,
    rounds: int,
    beside: Callable[[Measured, int], RawClients] = raw_clients,
    progress: Count = lambda done, total: None,
) -> dict[str, Any]:
    """Raises StoreError. `rounds` should be even, since who goes first alternates. `beside`: gives
    CALLERS clients to compare with, or none; they write so many bytes in all."""
    num_pages = max(1, total_bytes // page_bytes)
    samples: list[dict[str, float]] = []
    with (
        measured(text, page_bytes) as bench,
        beside(bench, rounds * num_pages * page_bytes) as clients,
    ):
        known = bench.keys(min(num_pages, PROBE_KEYS))
        bench.write(known)
        probe = bench.probe(known)
        bench.empty()
        for number in range(rounds):
            samples.append(_round(bench, clients, num_pages, number))
            progress(number + 1, rounds)
    return {
        "url": parse_url(text).shown,
        "rounds": rounds,
        "bytes_per_round": num_pages * page_bytes,
        "client": clients[0].does if clients else "",
        **summary(page_bytes, samples, raw=bool(clients)),
        "probe": {"keys": PROBE_KEYS, "one_ms": probe.one_s * 1e3, "all_ms": probe.many_s * 1e3},
    }


def _round(
    bench: Measured, clients: Sequence[RawClient], num_pages: int, number: int
) -> dict[str, float]:
    """GB/s of each side and way."""
    # The file store has many pages of a call on their way, direct I/O one: more threads call that.
    num_writers = CALLERS if bench.is_on_disk else LIMITS.write_threads
    writers, readers = clients[:num_writers], clients[: LIMITS.fetch_threads]
    sides: dict[str, tuple[_Move, _Move]] = {"store": (bench.write, bench.read)}
    if clients:
        sides["raw"] = partial(bench.raw, writers, puts=True), partial(bench.raw, readers)
    size = num_pages * bench.page_bytes
    keys = {side: bench.keys(num_pages) for side in sides}
    order = sorted(sides, reverse=number % 2 == 0)
    steps = [(side, way) for side in order for way in ("write", "read")]
    if bench.is_on_disk:  # nobody has to go before the other comes: what is compared is neighbours
        steps = [(side, way) for way in ("write", "read") for side in order]
    rates = {}
    for side, way in steps:
        write, read = sides[side]
        if way == "write":
            seconds = write(keys[side])
        else:
            bench.settle()
            seconds = read(bench.shuffled(keys[side]))
            bench.empty()
        rates[f"{side}_{way}"] = size / seconds / 1e9
    return rates


def _paired(ratios: Sequence[float]) -> list[float]:
    """One for each two rounds, in which the other side went first: their geometric mean, in which
    what being first is worth falls out. Of an odd number the last is left out; one is all there
    is."""
    pairs = zip(ratios[::2], ratios[1::2], strict=False)
    return [math.sqrt(first * second) for first, second in pairs] or list(ratios)
