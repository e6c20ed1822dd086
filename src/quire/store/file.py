"""A store in a directory: one object, one file, named by its content's key.

`file:///path?max=20GiB&reserve=5GiB`: `max` is the byte budget of the directory, shared by all
processes that have it open; `reserve` is free disk space that is left to others (default: 5 GiB,
or 5 % of a smaller file system). Several processes and hosts may share a directory.

An object is written into a temporary file and renamed: readers see all of it or nothing. There
is no fsync: a file torn by a power failure is caught by the page's checksum and costs a miss,
which is cheaper than making every write wait for the disk. Reads and writes go straight between
the host page and the disk (O_DIRECT) where the file system allows it.

A full or read-only disk makes the store read-only for a while; writes are then REJECTED.
Knows nothing of headers or checksums. Files that are not its own are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quire.errors import StoreURLError
from quire.store.base import Blob, ObjectName, StoredObject, StoreStats
from quire.store.file_budget import Budget, Ledger
from quire.store.file_io import direct_io_flag, read_object, write_object
from quire.store.file_layout import NUM_SHARDS, Layout, parse_name, unusable
from quire.store.file_scan import Scanner
from quire.store.file_space import FreeSpace, default_reserve
from quire.store.url import Options, StoreURL
from quire.types import PageStatus

DEFAULT_MAX_BYTES = 20 << 30

MARK_USE_AFTER_S = 600.0
"""A file's time is renewed when it is read this long after: the order of use survives a restart
and is seen by other processes, at one system call per file and ten minutes."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class FileStore:
    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        reserve_bytes: int | None = None,
        must_exist: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises StoreError when the directory cannot be used: one sentence with the fix."""
        self.url = root.absolute().as_uri()
        self._clock = clock
        self._wall_clock = wall_clock
        self._layout = Layout(root, must_exist=must_exist)
        try:
            self._direct = direct_io_flag(self._layout.scratch_path)
            ledger = Ledger(self._layout.usage_path, max_bytes // 1024)
            reserve_bytes = default_reserve(root) if reserve_bytes is None else reserve_bytes
        except OSError as error:
            self._layout.close()
            raise unusable(root, error) from error
        self._space = FreeSpace(root, reserve_bytes, clock)
        self._budget = Budget(max_bytes, ledger, self._remove)
        self._numbers = itertools.count()
        self._closing = threading.Lock()
        self._closed = False
        self._scanner = Scanner(self._layout, self._budget, ledger)

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Asks the directory itself: other processes add and remove. An object asked for is about
        to be fetched, so it counts as used."""
        return [self._contains_one(name.text) for name in names]

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        return self._each(self._get_one, names, into, deadline)

    def put(
        self, names: Sequence[ObjectName], blobs: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        return self._each(self._put_one, names, blobs, deadline)

    def quarantine(self, name: ObjectName) -> None:
        path = self._layout.object_path(name.text)
        with contextlib.suppress(FileNotFoundError):  # evicted, or quarantined by another reader
            size_bytes = os.stat(path).st_size
            os.rename(path, self._layout.quarantine_path(name.text))
            self._budget.forget(name.text, size_bytes)
            self._trim_quarantine()

    def scan(self) -> Iterator[StoredObject]:
        for shard in range(NUM_SHARDS):
            for text, stat in self._layout.scan_shard(shard):
                name = parse_name(text)
                if name is not None:
                    yield StoredObject(name, stat.st_size, stat.st_mtime)

    def clear(self) -> int:
        """Quarantined objects go too; they are counted."""
        count = 0
        for shard in range(NUM_SHARDS):
            for text, _ in self._layout.scan_shard(shard):
                freed = self._remove(text)
                self._budget.forget(text, freed)
                count += freed > 0
        for text, _ in self._layout.scan_quarantine():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._layout.quarantine_path(text))
                count += 1
        return count

    def stats(self) -> StoreStats:
        return StoreStats(
            num_objects=self._budget.num_objects,
            used_bytes=self._budget.used_bytes,
            capacity_bytes=self._budget.max_bytes,
            evicted_objects=self._budget.num_evicted,
            read_only=self._space.read_only,
        )

    def wait_scanned(self, timeout_s: float) -> bool:
        """Wait until the directory's content at opening is known. Nothing else needs it: until
        then the store serves and takes pages, and evicts among those it knows."""
        return self._scanner.scanned.wait(timeout_s)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._scanner.close()
        self._budget.close()
        self._layout.close()

    def _each(
        self,
        move: Callable[[str, Blob], PageStatus],
        names: Sequence[ObjectName],
        blobs: Sequence[Blob],
        deadline: float,
    ) -> list[PageStatus]:
        """One after the other: PageStore calls from several threads at once."""
        statuses = []
        for name, blob in zip(names, blobs, strict=True):
            late = self._clock() >= deadline
            statuses.append(PageStatus.TIMEOUT if late else move(name.text, blob))
        return statuses

    def _contains_one(self, text: str) -> bool:
        try:
            size_bytes = os.stat(self._layout.object_path(text)).st_size
        except OSError:
            return False
        self._budget.touch(text, size_bytes)
        return True

    def _get_one(self, text: str, blob: Blob) -> PageStatus:
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | self._direct
            fd = os.open(self._layout.object_path(text), flags)
        except FileNotFoundError:
            return PageStatus.MISS
        except OSError:
            return PageStatus.FAILED
        try:
            stat = os.fstat(fd)
            status = read_object(fd, stat.st_size, blob)
            self._mark_used(fd, text, stat)
        except OSError:
            return PageStatus.FAILED
        finally:
            os.close(fd)
        return status

    def _put_one(self, text: str, blob: Blob) -> PageStatus:
        size_bytes = blob.header.nbytes + blob.payload.nbytes
        try:
            if not self._space.take(size_bytes, self._budget.evict_one):
                return PageStatus.REJECTED
            if not self._budget.reserve(size_bytes):
                self._scanner.ask()  # others may have filled the budget with files unknown to us
                return PageStatus.REJECTED
            try:
                self._publish(text, blob)
            except OSError:
                self._budget.release(size_bytes)
                raise
        except OSError as error:
            if error.errno not in _FULL:
                return PageStatus.FAILED
            self._space.refused(error)
            return PageStatus.REJECTED
        self._budget.touch(text, size_bytes)
        self._scanner.wrote(size_bytes)
        return PageStatus.OK

    def _publish(self, text: str, blob: Blob) -> None:
        temporary = self._layout.temporary_path(text, next(self._numbers))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
        fd = os.open(temporary, flags, 0o644)
        try:
            try:
                write_object(fd, blob)
            finally:
                os.close(fd)
            os.rename(temporary, self._layout.object_path(text))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _mark_used(self, fd: int, text: str, stat: os.stat_result) -> None:
        self._budget.touch(text, stat.st_size)
        if self._wall_clock() - stat.st_mtime > MARK_USE_AFTER_S:
            with contextlib.suppress(OSError):  # another user's file: its owner keeps the time
                os.utime(fd)

    def _remove(self, text: str) -> int:
        """Delete an object; bytes freed, 0 if it was gone."""
        path = self._layout.object_path(text)
        try:
            size_bytes = os.stat(path).st_size
            os.unlink(path)
        except OSError:
            return 0
        return size_bytes

    def _trim_quarantine(self) -> None:
        """Oldest first, down to a sixteenth of the budget."""
        kept = sorted(self._layout.scan_quarantine(), key=lambda item: -item[1].st_mtime)
        total = 0
        for text, stat in kept:
            total += stat.st_size
            if total > self._budget.max_bytes // 16:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._layout.quarantine_path(text))


def open_url(url: StoreURL) -> FileStore:
    if url.host not in ("", "localhost") or not url.path.startswith("/"):
        raise StoreURLError(
            f"{url.text!r} has no absolute path: write three slashes, as in file:///var/cache/quire"
        )
    options = Options(url)
    max_bytes = options.size("max", DEFAULT_MAX_BYTES)
    reserve_bytes = options.size("reserve", -1)
    options.finish()
    if max_bytes == 0:
        raise StoreURLError(f"option 'max' in {url.text!r} must be above 0")
    store = FileStore(
        Path(url.path),
        max_bytes=max_bytes,
        reserve_bytes=None if reserve_bytes < 0 else reserve_bytes,
        must_exist=url.must_exist,
    )
    store.url = url.text
    return store
