"""Writing objects of a file store: each into a temporary file, published by renaming it.

Knows what an object needs (the page before it) and where its bytes go; the order of use (uses.py)
and who makes room (budget.py) are others' business. Several threads write at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quire.store.base import STEP_NS, NewObject, ObjectName
from quire.store.file.budget import Budget, FilePlace
from quire.store.file.cold import ColdQueue
from quire.store.file.io import BulkIO
from quire.store.file.layout import Layout
from quire.store.file.owners import Owners
from quire.store.file.space import FreeSpace
from quire.store.file.uses import renew_path_to, set_parent, set_time, time_of
from quire.types import Owner, PageStatus

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

WriteTimes = dict[ObjectName, int | None]
"""Of the objects of one call: when each was used, once it is published."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """An object being written: reserved, open, not yet visible."""

    page: NewObject
    path: str
    fd: int


class FileWriter:
    def __init__(
        self,
        layout: Layout,
        io: BulkIO,
        budget: Budget,
        space: FreeSpace,
        cold: ColdQueue,
        *,
        owners: Owners,
        wrote: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """`wrote(size_bytes)` is told of every object published."""
        self._layout = layout
        self._io = io
        self._budget = budget
        self._space = space
        self._cold = cold
        self._owners = owners
        self._wrote = wrote
        self._clock = clock
        self._numbers = itertools.count()
        flags = os.O_WRONLY | os.O_CLOEXEC | io.direct_flag
        self._write_flags = flags | os.O_CREAT | os.O_EXCL
        self._rewrite_flags = flags

    def put(self, pages: Sequence[NewObject], deadline: float) -> list[PageStatus]:
        """A parent comes before its child."""
        if self._clock() >= deadline:
            return [PageStatus.TIMEOUT] * len(pages)
        times: WriteTimes = {page.name: None for page in pages}
        begun = self._begin(pages, times)
        drafts = [item for item in begun if isinstance(item, _Draft)]
        buffers = [(draft.page.blob.header, draft.page.blob.payload) for draft in drafts]
        results = self._io.write([draft.fd for draft in drafts], buffers)
        # In order, so that a page is never there before the page that it needs.
        finished = [
            self._finish(draft, result, times)
            for draft, result in zip(drafts, results, strict=True)
        ]
        self._note_owners(drafts, finished)
        rest = iter(finished)
        return [item if isinstance(item, PageStatus) else next(rest) for item in begun]

    def _begin(self, pages: Sequence[NewObject], times: WriteTimes) -> list[_Draft | PageStatus]:
        """Reserve space and open the temporary files.

        At the budget these are the files of the coldest objects: that spares the file system
        removing one file and making another of the same size, which can cost more than writing
        it. Whoever is reading the old object meanwhile finds that it does not fit its name.
        """
        begun: list[_Draft | PageStatus] = [PageStatus.ORPHAN] * len(pages)
        usable = {
            i: page
            for i, page in enumerate(pages)
            if page.parent in times or self._time_for(page, times) is not None
        }
        try:
            for i in self._refused(usable, times):
                begun[i] = PageStatus.REJECTED
                del usable[i]
            places = {
                i: FilePlace(
                    self._layout.temporary_path(page.name.text, next(self._numbers)),
                    page.size_bytes,
                )
                for i, page in usable.items()
            }
            recycled = self._budget.recycle(list(places.values()))
        except OSError as error:
            return [self._refusal(error)] * len(pages)
        for i, (path, _) in places.items():
            begun[i] = self._open(pages[i], path, path in recycled)
        return begun

    def _refused(self, pages: Mapping[int, NewObject], times: WriteTimes) -> list[int]:
        """Which of these are more than their owners may have. Raises OSError."""
        refused: list[int] = []
        for owner in {page.owner for page in pages.values()} - {None}:
            own = {i: page for i, page in pages.items() if page.owner == owner}
            size_bytes = sum(page.size_bytes for page in own.values())
            bound_ns = min(self._time_for(page, times) or page.used_ns for page in own.values())
            assert owner is not None
            room = self._owners.room(owner, size_bytes, bound_ns)
            for i, page in own.items():
                room -= page.size_bytes
                if room < 0:
                    refused.append(i)
        return refused

    def _note_owners(self, drafts: Sequence[_Draft], statuses: Sequence[PageStatus]) -> None:
        written: dict[Owner, list[tuple[str, int]]] = {}
        for draft, status in zip(drafts, statuses, strict=True):
            page = draft.page
            if page.owner is not None and status is PageStatus.OK:
                written.setdefault(page.owner, []).append((page.name.text, page.size_bytes))
        for owner, objects in written.items():
            with contextlib.suppress(OSError):  # the disk is full: it has these unasked
                self._owners.wrote(owner, objects)

    def _open(self, page: NewObject, path: str, is_recycled: bool) -> _Draft | PageStatus:
        try:
            if not is_recycled and not self._budget.reserve(page.size_bytes):
                return PageStatus.REJECTED
            try:
                if is_recycled:
                    return _Draft(page, path, os.open(path, self._rewrite_flags))
                return _Draft(page, path, self._create(path, page.size_bytes))
            except OSError:
                self._forget(path, page.size_bytes)
                raise
        except OSError as error:
            return self._refusal(error)

    def _time_for(self, page: NewObject, times: WriteTimes) -> int | None:
        """A little before what it needs. None: that is not there, or about to go."""
        if page.parent is None:
            return page.used_ns
        if page.parent in times:
            parent_ns = times[page.parent]
        else:
            path = self._layout.object_path(page.parent.text)
            parent_ns = renew_path_to(path, page.used_ns, self._cold.scan_start_ns)
            if parent_ns is not None and parent_ns < self._cold.bound_ns:
                return None
        return None if parent_ns is None else min(page.used_ns, parent_ns - STEP_NS)

    def _create(self, path: str, size_bytes: int) -> int:
        try:
            fd = os.open(path, self._write_flags, 0o644)
        except FileNotFoundError:  # the store was cleared, and the folders are not there yet
            self._layout.make_folders()
            fd = os.open(path, self._write_flags, 0o644)
        with contextlib.suppress(OSError):  # what grows while written is written serially
            os.ftruncate(fd, size_bytes)
        return fd

    def _finish(self, draft: _Draft, num_bytes: int, times: WriteTimes) -> PageStatus:
        """Publish what was written, or leave no trace of it."""
        path = self._layout.object_path(draft.page.name.text)
        time_ns = self._time_for(draft.page, times)
        try:
            try:
                if num_bytes < 0:
                    raise OSError(-num_bytes, os.strerror(-num_bytes))
                if num_bytes != draft.page.size_bytes:
                    # For a file, fewer bytes taken than offered means that the disk is full.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if time_ns is not None:
                    set_parent(draft.fd, draft.page.parent)
                    set_time(draft.fd, time_ns)
            finally:
                os.close(draft.fd)
            if time_ns is None:
                status = PageStatus.ORPHAN
            elif (there_ns := time_of(path)) is not None:  # another process was faster
                times[draft.page.name] = there_ns
                status = PageStatus.OK
            else:
                os.rename(draft.path, path)
                times[draft.page.name] = time_ns
                self._wrote(draft.page.size_bytes)
                return PageStatus.OK
        except OSError as error:
            status = self._refusal(error)
        self._forget(draft.path, draft.page.size_bytes)
        return status

    def _forget(self, path: str, size_bytes: int) -> None:
        self._budget.release(size_bytes)
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _refusal(self, error: OSError) -> PageStatus:
        if error.errno not in _FULL:
            return PageStatus.FAILED
        self._space.refused(error)
        return PageStatus.REJECTED
