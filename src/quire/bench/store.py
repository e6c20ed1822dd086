"""`quire bench store`: the file store, checksums on, beside raw direct I/O on the same disk.

Raw writes go into a new file, preallocated outside the timing, one per round: threads write blocks
of the page size with O_DIRECT, as the store also writes new data. Raw reads read those blocks in
random order; store reads ask for the round's pages in random order. Both go round the same host
pages: a few buffers that stay in the cache would flatter raw. The store is driven as bench.anystore
drives any.

Disks are noisy, so every round times store and raw next to each other, in alternating order, and
the result is the median of the ratios of two rounds each. Files are deleted only after the last
round: deleting costs the disk work that would fall into somebody's measurement.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quire.bench.anystore import Measured, parallel, summary
from quire.errors import StoreError
from quire.progress import Count
from quire.sizes import format_bytes
from quire.store.file import FileStore
from quire.store.packing import PackKind
from quire.store.url import parse_url

GIB = 1 << 30
RAW_THREADS = 8


def run(
    path: str,
    *,
    page_bytes: int,
    total_bytes: int,
    rounds: int,
    progress: Count = lambda done, total: None,
) -> dict[str, Any]:
    """Measure in a new folder under `path`, removed afterwards. `total_bytes` is per round;
    `rounds` should be even, since who goes first alternates.

    Raises StoreError when the directory cannot be used, or its disk has too little room.
    """
    needed = 2 * rounds * total_bytes + GIB
    samples = []
    with _told(path):
        disk = os.statvfs(path)
        if disk.f_bavail * disk.f_frsize < needed:
            raise StoreError(
                f"the benchmark needs {format_bytes(needed)} free at {path!r}: "
                f"give another path or a smaller total"
            )
        with _measured(path, page_bytes) as (bench, folder):
            for number in range(rounds):
                raw = folder / f"raw-{number}"
                samples.append(_round(bench, raw, total_bytes // page_bytes, number))
                progress(number + 1, rounds)
    return {
        "url": f"file://{path}",
        "client": f"direct I/O, {RAW_THREADS} threads, into one file",
        "rounds": rounds,
        "bytes_per_round": total_bytes,
        **summary(page_bytes, samples),
    }


@contextmanager
def _measured(path: str, page_bytes: int) -> Iterator[tuple[Measured, Path]]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=path) as name:
        folder = Path(name)
        store = FileStore(folder / "store", max_bytes=1 << 50, reserve_bytes=0)
        with closing(store):
            url = parse_url(folder.as_uri())
            yield Measured(url, store, page_bytes, PackKind.NONE), folder


@contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot measure in {path!r} ({error.strerror}): "
            "give a directory that this user can write to"
        ) from error


def _round(bench: Measured, raw: Path, num_pages: int, number: int) -> dict[str, float]:
    """GB/s of each side and way."""
    keys, chance = bench.keys(num_pages), random.Random(number)
    shuffled, blocks = chance.sample(keys, num_pages), chance.sample(range(num_pages), num_pages)
    fd = os.open(raw, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, num_pages * bench.page_bytes)
        direct = partial(_direct, bench, fd)
        steps: dict[str, Callable[[], float]] = {
            "store_write": lambda: bench.write(keys),
            "raw_write": lambda: direct(os.pwritev, range(num_pages)),
            "store_read": lambda: bench.read(shuffled),
            "raw_read": lambda: direct(os.preadv, blocks),
        }
        rates = {}
        for way in ("write", "read"):
            for side in ("store", "raw") if number % 2 == 0 else ("raw", "store"):
                seconds = steps[f"{side}_{way}"]()
                rates[f"{side}_{way}"] = num_pages * bench.page_bytes / seconds / 1e9
            os.sync()  # or writing back metadata of this round's files falls into the reads
        return rates
    finally:
        os.close(fd)


def _direct(
    bench: Measured,
    fd: int,
    move: Callable[[int, Sequence[memoryview], int], int],
    blocks: Sequence[int],
) -> float:
    """Seconds."""

    def work(thread: int) -> None:
        for number in range(thread, len(blocks), RAW_THREADS):
            page = bench.pages[number % len(bench.pages)]
            move(fd, [page], blocks[number] * bench.page_bytes)

    began_s = time.perf_counter()
    parallel(work, RAW_THREADS)
    return time.perf_counter() - began_s
