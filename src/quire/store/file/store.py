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
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from quire.errors import StoreURLError
from quire.store.account import StoreBudget
from quire.store.base import HEADER_BYTES, Blob, NewObject, ObjectName, StoredObject, StoreStats
from quire.store.file.budget import Budget, FilePlace, Ledger
from quire.store.file.cold import ColdQueue
from quire.store.file.io import BulkIO
from quire.store.file.layout import Layout, unusable
from quire.store.file.owners import Owners
from quire.store.file.scan import Scanner
from quire.store.file.space import FreeSpace
from quire.store.file.uses import renew
from quire.store.file.writing import FileWriter
from quire.store.url import Options, StoreURL
from quire.types import PageStatus

DEFAULT_MAX_BYTES = 20 << 30


class FileStore:
    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        reserve_bytes: int | None = None,
        must_exist: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Raises StoreError when the directory cannot be used: one sentence with the fix."""
        self._clock = clock
        self._layout = Layout(root, must_exist=must_exist)
        with contextlib.ExitStack() as opened:
            opened.callback(self._layout.close)
            try:
                self._io = BulkIO(self._layout.scratch_path)
                opened.callback(self._io.close)
                self._ledger = Ledger(self._layout.usage_path, max_bytes // 1024)
                opened.callback(self._ledger.close)
                self._cold = ColdQueue(self._layout.cold_path)
                opened.callback(self._cold.close)
                self._space = FreeSpace(root, reserve_bytes, clock)
                self._owners = Owners(
                    self._layout.owners_path,
                    max_bytes,
                    path_of=self._layout.object_path,
                    remove=self._remove_own,
                )
                self._scanner = Scanner(
                    self._layout,
                    self._ledger,
                    self._cold,
                    scan_every_bytes=max_bytes,
                    wall_ns=wall_ns,
                    sweep=self._owners.sweep,
                )
            except OSError as error:
                raise unusable(root, error) from error
            opened.callback(self._scanner.close)
            self._opened = opened.pop_all()
        self._budget = Budget(
            max_bytes,
            self._ledger,
            self._space,
            self._cold,
            remove=self._remove,
            refill=self._scanner.refill,
            delete_cleared=self._scanner.delete_cleared,
        )
        self._writer = FileWriter(
            self._layout,
            self._io,
            self._budget,
            self._space,
            self._cold,
            owners=self._owners,
            wrote=self._scanner.wrote,
            clock=clock,
        )
        # A pipe of somebody's in a page's place has nobody who writes into it.
        self._read_flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | self._io.direct_flag
        self._spill = memoryview(mmap.mmap(-1, HEADER_BYTES))
        self._closing = threading.Lock()
        self._closed = False

    def budget(self) -> StoreBudget:
        """What all processes have in it, as far as this one knows."""
        return StoreBudget(self._ledger.known.num_bytes, self._budget.max_bytes, is_shared=True)

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Asks the directory itself: other processes add and remove."""
        found = [os.access(self._layout.object_path(name.text), os.F_OK) for name in names]
        if not any(found):
            self._layout.look()
        return found

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        if self._clock() >= deadline:
            return [PageStatus.TIMEOUT] * len(names)
        statuses = [PageStatus.MISS] * len(names)
        fds: list[int] = []
        opened: list[int] = []
        try:
            for i, name in enumerate(names):
                try:
                    fds.append(os.open(self._layout.object_path(name.text), self._read_flags))
                    opened.append(i)
                except FileNotFoundError:
                    pass
                except OSError:
                    statuses[i] = PageStatus.FAILED
            # The spill is a block nobody looks at: a file longer than it should be runs over
            # into it, which tells its length without another system call per page.
            buffers = [(into[i].header, into[i].payload, self._spill) for i in opened]
            results = self._io.read(fds, buffers)
            for i, num_bytes in zip(opened, results, strict=True):
                whole = num_bytes == into[i].header.nbytes + into[i].payload.nbytes
                unread = PageStatus.FAILED if num_bytes < 0 else PageStatus.CORRUPT
                statuses[i] = PageStatus.OK if whole else unread
        finally:
            for fd in fds:
                os.close(fd)
        return statuses

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        self._restore()
        return self._writer.put(objects, deadline)

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        paths = [self._layout.object_path(name.text) for name in names]
        renew(paths, used_ns, self._cold.scan_start_ns, each=each)

    def quarantine(self, name: ObjectName) -> bool:
        path = self._layout.object_path(name.text)
        try:
            size_bytes = os.stat(path).st_size
            self._layout.set_aside(name.text)
        except FileNotFoundError:  # evicted, or quarantined by another reader
            return False
        self._budget.release(size_bytes)
        self._trim_quarantine()
        return True

    def scan(self) -> Iterator[StoredObject]:
        for text, stat in self._layout.scan():
            name = ObjectName.parse(text)
            if name is not None:
                yield StoredObject(name, stat.st_size, stat.st_mtime)

    def clear(self, *, wait: bool = False) -> int:
        """Quarantined objects go too; they are not counted."""
        self._restore()
        if wait:
            return self._scanner.clear()
        self._layout.discard()
        self._scanner.ask(at_once=True)
        return 0

    def stats(self) -> StoreStats:
        used = self._ledger.total()
        return StoreStats(
            num_objects=used.num_objects,
            used_bytes=used.num_bytes,
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
        self._opened.close()

    def _restore(self) -> None:
        """Somebody may have emptied the directory: it goes on as an empty store."""
        if self._layout.restore():
            self._scanner.ask(at_once=True)

    def _remove(self, text: str, bound_ns: int, place: FilePlace | None) -> int:
        path = self._layout.object_path(text)
        try:
            stat = os.stat(path)
            if stat.st_mtime_ns >= bound_ns:
                return 0
            if place is not None and place.size_bytes == stat.st_size:
                os.rename(path, place.path)
            else:
                os.unlink(path)
        except OSError:
            return 0
        return stat.st_size

    def _remove_own(self, text: str, bound_ns: int) -> int:
        """To make room for what its owner has more."""
        freed_bytes = self._remove(text, bound_ns, None)
        if freed_bytes:
            self._budget.release(freed_bytes)
            self._budget.num_evicted += 1
        return freed_bytes

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
            f"{url.shown!r} has no absolute path: write three slashes, as in file:///var/cache/quire"
        )
    options = Options(url)
    max_bytes = options.size("max", DEFAULT_MAX_BYTES)
    reserve_bytes = options.size("reserve", -1)
    options.finish()
    if max_bytes == 0:
        raise StoreURLError(f"option 'max' in {url.shown!r} must be above 0")
    return FileStore(
        Path(url.path),
        max_bytes=max_bytes,
        reserve_bytes=None if reserve_bytes < 0 else reserve_bytes,
        must_exist=url.must_exist,
    )
