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
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import StoreURLError
from quire.store.base import HEADER_BYTES, Blob, ObjectName, StoredObject, StoreStats
from quire.store.file.budget import Budget, FreshTimes, Ledger
from quire.store.file.io import GROUP_OBJECTS, BulkIO
from quire.store.file.layout import NUM_SHARDS, Layout, parse_name, unusable
from quire.store.file.scan import Scanner
from quire.store.file.space import FreeSpace, default_reserve
from quire.store.url import Options, StoreURL
from quire.types import PageStatus

DEFAULT_MAX_BYTES = 20 << 30

MARK_USE_EVERY_S = 600.0
"""How often a file's time is renewed by reading it: the order of use survives a restart and is
seen by other processes, at one system call per file and ten minutes."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, slots=True)
class _Draft:
    """An object being written: reserved, open, not yet visible."""

    text: str
    blob: Blob
    size_bytes: int
    path: str
    fd: int


class FileStore:
    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        reserve_bytes: int | None = None,
        must_exist: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises StoreError when the directory cannot be used: one sentence with the fix."""
        self.url = root.absolute().as_uri()
        self._clock = clock
        self._layout = Layout(root, must_exist=must_exist)
        try:
            self._io = BulkIO(self._layout.scratch_path)
            ledger = Ledger(self._layout.usage_path, max_bytes // 1024)
            reserve_bytes = default_reserve(root) if reserve_bytes is None else reserve_bytes
        except OSError as error:
            self._layout.close()
            raise unusable(root, error) from error
        self._space = FreeSpace(root, reserve_bytes, clock)
        self._budget = Budget(max_bytes, ledger, self._remove)
        self._fresh = FreshTimes(clock, MARK_USE_EVERY_S)
        self._numbers = itertools.count()
        flags = os.O_CLOEXEC | self._io.direct_flag
        self._read_flags = os.O_RDONLY | flags
        self._write_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags
        self._rewrite_flags = os.O_WRONLY | flags
        self._spill = memoryview(mmap.mmap(-1, HEADER_BYTES))
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
        return self._in_groups(self._get_group, names, into, deadline)

    def put(
        self, names: Sequence[ObjectName], blobs: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        return self._in_groups(self._put_group, names, blobs, deadline)

    def quarantine(self, name: ObjectName) -> bool:
        path = self._layout.object_path(name.text)
        try:
            size_bytes = os.stat(path).st_size
            os.rename(path, self._layout.quarantine_path(name.text))
        except FileNotFoundError:  # evicted, or quarantined by another reader
            return False
        self._budget.forget(name.text, size_bytes)
        self._trim_quarantine()
        return True

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
        self._io.close()
        self._layout.close()

    def _in_groups(
        self,
        move: Callable[[list[str], Sequence[Blob]], list[PageStatus]],
        names: Sequence[ObjectName],
        blobs: Sequence[Blob],
        deadline: float,
    ) -> list[PageStatus]:
        statuses: list[PageStatus] = []
        for i in range(0, len(names), GROUP_OBJECTS):
            texts = [name.text for name in names[i : i + GROUP_OBJECTS]]
            if self._clock() >= deadline:
                statuses += [PageStatus.TIMEOUT] * len(texts)
            else:
                statuses += move(texts, blobs[i : i + GROUP_OBJECTS])
        return statuses

    def _contains_one(self, text: str) -> bool:
        if not os.access(self._layout.object_path(text), os.F_OK):
            return False
        self._budget.touch_known(text)
        return True

    def _get_group(self, texts: list[str], blobs: Sequence[Blob]) -> list[PageStatus]:
        statuses = [PageStatus.MISS] * len(texts)
        fds: list[int] = []
        opened: list[int] = []
        try:
            for i, text in enumerate(texts):
                try:
                    fds.append(os.open(self._layout.object_path(text), self._read_flags))
                    opened.append(i)
                except FileNotFoundError:
                    pass
                except OSError:
                    statuses[i] = PageStatus.FAILED
            # The spill is a block nobody looks at: a file longer than it should be runs over
            # into it, which tells its length without another system call per page.
            buffers = [(blobs[i].header, blobs[i].payload, self._spill) for i in opened]
            results = self._io.read(fds, buffers)
            for i, fd, result in zip(opened, fds, results, strict=True):
                statuses[i] = self._got(texts[i], fd, blobs[i], result)
        finally:
            for fd in fds:
                os.close(fd)
        return statuses

    def _got(self, text: str, fd: int, blob: Blob, num_bytes: int) -> PageStatus:
        if num_bytes < 0:
            return PageStatus.FAILED
        size_bytes = blob.header.nbytes + blob.payload.nbytes
        if num_bytes != size_bytes:
            return PageStatus.CORRUPT
        self._budget.touch(text, size_bytes)
        if self._fresh.is_due(text):
            _renew_time(fd)
        return PageStatus.OK

    def _put_group(self, texts: list[str], blobs: Sequence[Blob]) -> list[PageStatus]:
        begun = [self._begin(text, blob) for text, blob in zip(texts, blobs, strict=True)]
        drafts = [item for item in begun if isinstance(item, _Draft)]
        buffers = [(draft.blob.header, draft.blob.payload) for draft in drafts]
        results = self._io.write([draft.fd for draft in drafts], buffers)
        finished = map(self._finish, drafts, results)
        return [item if isinstance(item, PageStatus) else next(finished) for item in begun]

    def _begin(self, text: str, blob: Blob) -> _Draft | PageStatus:
        """Reserve space and open the temporary file."""
        size_bytes = blob.header.nbytes + blob.payload.nbytes
        try:
            path = self._layout.temporary_path(text, next(self._numbers))
            fd = self._recycle(path, size_bytes)
            if fd is None:
                if not self._space.take(size_bytes, self._budget.evict_one):
                    return PageStatus.REJECTED
                if not self._budget.reserve(size_bytes):
                    self._scanner.ask()  # others may have filled the budget with unknown files
                    return PageStatus.REJECTED
                try:
                    fd = os.open(path, self._write_flags, 0o644)
                except OSError:
                    self._budget.release(size_bytes)
                    raise
                with contextlib.suppress(OSError):  # what grows while written is written serially
                    os.ftruncate(fd, size_bytes)
        except OSError as error:
            return self._refusal(error)
        return _Draft(text, blob, size_bytes, path, fd)

    def _recycle(self, path: str, size_bytes: int) -> int | None:
        """At the budget: the coldest object's file, as the temporary file of the new one.

        Spares the file system removing one file and making another of the same size, which can
        cost more than writing it. Whoever is reading the old object meanwhile finds that it does
        not fit its name.
        """
        old = self._budget.take_over(size_bytes)
        if old is None:
            return None
        try:
            os.rename(self._layout.object_path(old), path)
        except OSError:  # removed, and accounted for, by another process
            return None
        try:
            return os.open(path, self._rewrite_flags)
        except OSError:
            self._budget.release(size_bytes)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None

    def _finish(self, draft: _Draft, num_bytes: int) -> PageStatus:
        """Publish what was written, or leave no trace of it."""
        os.close(draft.fd)
        try:
            if num_bytes < 0:
                raise OSError(-num_bytes, os.strerror(-num_bytes))
            if num_bytes != draft.size_bytes:
                # For a file, fewer bytes taken than offered means that the disk is full.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.rename(draft.path, self._layout.object_path(draft.text))
        except OSError as error:
            self._budget.release(draft.size_bytes)
            with contextlib.suppress(OSError):
                os.unlink(draft.path)
            return self._refusal(error)
        self._budget.touch(draft.text, draft.size_bytes)
        self._fresh.is_due(draft.text)  # written now: its time is right already
        self._scanner.wrote(draft.size_bytes)
        return PageStatus.OK

    def _refusal(self, error: OSError) -> PageStatus:
        if error.errno not in _FULL:
            return PageStatus.FAILED
        self._space.refused(error)
        return PageStatus.REJECTED

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


def _renew_time(fd: int) -> None:
    with contextlib.suppress(OSError):  # another user's file: its owner keeps the time
        os.utime(fd)


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
