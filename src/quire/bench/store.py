"""`quire bench store`: the file store, checksums on, beside raw direct I/O on the same disk.

Raw writes go into a new file, preallocated outside the timing, one per round: `threads` threads
write blocks of the page size with O_DIRECT, as the store also writes new data. Raw reads read
those blocks in random order; store reads ask for the round's pages in random order. Both go round
the same host pages: a few buffers that stay in the cache would flatter raw. The store is
driven as a worker drives it: as many calling threads and pages per call as a worker has by
default.

Disks are noisy, so every round times store and raw next to each other, in alternating order, and
the result is the median of the ratios of two rounds each. Files are deleted only after the last
round of a page size: deleting costs the disk work that would fall into somebody's measurement.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import StoreError
from quire.sizes import format_bytes
from quire.store.base import Part
from quire.store.client import PageStore
from quire.store.file import FileStore
from quire.types import PageKey, PageStatus
from quire.worker.config import IoLimits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_SIZES = (360 * KIB, 2 * MIB)
LIMITS = IoLimits()
"""As a worker has them: threads that call the store, and pages per call."""
DEADLINE_S = 600.0

Timed = Callable[[], None]


def run(
    path: str,
    *,
    page_sizes: Sequence[int] = PAGE_SIZES,
    total_bytes: int = 512 * MIB,
    threads: int = 8,
    rounds: int = 8,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure in a new folder under `path`, removed afterwards. `total_bytes` is per round;
    `threads` is for the raw side; `rounds` should be even, since who goes first alternates.

    Raises StoreError when the directory cannot be used, or its disk has too little room.
    """
    needed = 2 * rounds * total_bytes + GIB
    with _told(path):
        disk = os.statvfs(path)
    if disk.f_bavail * disk.f_frsize < needed:
        raise StoreError(
            f"the benchmark needs {format_bytes(needed)} free at {path!r}: "
            f"give another path or a smaller total"
        )
    results = []
    for i, page_bytes in enumerate(page_sizes):
        with (
            _told(path),
            _folder(Path(path) / f"quire-bench-{os.getpid()}") as folder,
            _Bench(folder, page_bytes, total_bytes, threads, seed) as bench,
        ):
            samples = []
            for number in range(rounds):
                samples.append(bench.round(number))
                progress(i * rounds + number + 1, len(page_sizes) * rounds)
        results.append(summary(page_bytes, samples))
    return {
        "raw_threads": threads,
        "rounds": rounds,
        "bytes_per_round": total_bytes,
        "pages": results,
    }


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot measure in {path!r} ({error.strerror}): "
            "give a directory that this user can write to"
        ) from error


def summary(
    page_bytes: int, samples: list[dict[str, float]], *, raw: bool = True
) -> dict[str, Any]:
    """Rates in GB/s; without `raw` there is nothing to compare with."""
    entry: dict[str, Any] = {"page_bytes": page_bytes}
    for way in ("write", "read"):
        entry[way] = {"store_gb_s": statistics.median(sample[f"store_{way}"] for sample in samples)}
        if raw:
            ratios = paired([sample[f"store_{way}"] / sample[f"raw_{way}"] for sample in samples])
            entry[way] |= {
                "raw_gb_s": statistics.median(sample[f"raw_{way}"] for sample in samples),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": quartiles(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
    return entry


def quartiles(ratios: Sequence[float]) -> list[float]:
    """The first and the third; of one there is nothing between."""
    if len(ratios) == 1:
        return [*ratios, *ratios]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive")
    return [first, third]


def paired(ratios: Sequence[float]) -> list[float]:
    """One for each two rounds, in which the other side went first: their geometric mean, in which
    what being first is worth falls out. Of an odd number the last is left out; one is all there
    is."""
    pairs = list(zip(ratios[::2], ratios[1::2], strict=False))
    return [math.sqrt(first * second) for first, second in pairs] or list(ratios)


class _Bench:
    """Buffers, store and raw files for one page size."""

    def __init__(
        self, folder: Path, page_bytes: int, total_bytes: int, threads: int, seed: int
    ) -> None:
        self._folder = folder
        self._page_bytes = page_bytes
        self._num_pages = total_bytes // page_bytes
        self._threads = threads
        self._random = random.Random(seed)
        file_store = FileStore(folder / "store", max_bytes=1 << 50, reserve_bytes=0)
        self._store = PageStore(file_store, clock=time.monotonic)
        self._part = Part("full", 0, 1, bytes(32), page_bytes)
        noise = self._random.randbytes(page_bytes)
        callers = max(LIMITS.fetch_threads, LIMITS.write_threads)
        self._pages = [_page(noise) for _ in range(callers * LIMITS.batch_pages)]

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def round(self, number: int) -> dict[str, float]:
        keys = [PageKey(self._random.randbytes(32)) for _ in range(self._num_pages)]
        shuffled = self._random.sample(keys, len(keys))
        blocks = self._random.sample(range(self._num_pages), self._num_pages)
        raw_path = str(self._folder / f"raw-{number}")
        fd = os.open(raw_path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, self._num_pages * self._page_bytes)
            steps: dict[str, Timed] = {
                "store_write": lambda: self._store_pass(
                    self._store.put, keys, LIMITS.write_threads
                ),
                "raw_write": lambda: self._raw_pass(os.pwritev, fd, range(self._num_pages)),
                "store_read": lambda: self._store_pass(
                    self._store.get, shuffled, LIMITS.fetch_threads
                ),
                "raw_read": lambda: self._raw_pass(os.preadv, fd, blocks),
            }
            order = list(steps) if number % 2 == 0 else [list(steps)[i] for i in (1, 0, 3, 2)]
            rates = {name: self._rate(steps[name]) for name in order[:2]}
            os.sync()  # or writing back metadata of this round's files falls into the reads
            return rates | {name: self._rate(steps[name]) for name in order[2:]}
        finally:
            os.close(fd)

    def _rate(self, step: Timed) -> float:
        """GB/s."""
        start = time.perf_counter()
        step()
        return self._num_pages * self._page_bytes / (time.perf_counter() - start) / 1e9

    def _store_pass(
        self, call: Callable[..., list[PageStatus]], keys: Sequence[PageKey], num_callers: int
    ) -> None:
        size = LIMITS.batch_pages
        batches = [keys[i : i + size] for i in range(0, len(keys), size)]

        def work(caller: int) -> None:
            pages = self._pages[caller * size : (caller + 1) * size]
            for batch in batches[caller::num_callers]:
                deadline = time.monotonic() + DEADLINE_S
                statuses = call(self._part, batch, pages[: len(batch)], deadline=deadline)
                if any(status is not PageStatus.OK for status in statuses):
                    raise StoreError(f"the store did not move every page: {set(statuses)}")

        parallel(work, num_callers)

    def _raw_pass(
        self,
        move: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        blocks: Sequence[int],
    ) -> None:
        def work(thread: int) -> None:
            for number in range(thread, len(blocks), self._threads):
                page = self._pages[number % len(self._pages)]
                move(fd, [page], blocks[number] * self._page_bytes)

        parallel(work, self._threads)


def _page(content: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view


def parallel(work: Callable[[int], None], num_threads: int) -> None:
    """Run `work(i)` on threads of its own; raises what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except Exception as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
