"""Writing objects of a file store: each into a temporary file, published by renaming it.

Knows what an object needs (the page before it) and where its bytes go; the order of use (uses.py)
and who makes room (budget.py) are others' business. Several threads write at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.store.base import STEP_NS, Blob
from quire.store.file.budget import Budget
from quire.store.file.cold import ColdQueue
from quire.store.file.io import GROUP_OBJECTS, BulkIO
from quire.store.file.layout import Layout
from quire.store.file.space import FreeSpace
from quire.store.file.uses import set_parent, set_time, time_of
from quire.types import PageStatus

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

Times = dict[str, int | None]
"""Of the objects of one call: when each was used, once it is published."""


class Page(NamedTuple):
    """An object to be written."""

    text: str
    parent: str | None
    """What it is of no use without."""
    used_ns: int
    blob: Blob


@dataclass(frozen=True, slots=True)
class _Draft:
    """An object being written: reserved, open, not yet visible."""

    page: Page
    size_bytes: int
    path: str
    fd: int


class Writer:
    def __init__(
        self,
        layout: Layout,
        io: BulkIO,
        budget: Budget,
        space: FreeSpace,
        cold: ColdQueue,
        *,
        wrote: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """`wrote(size_bytes)` is told of every object published."""
        self._layout = layout
        self._io = io
        self._budget = budget
        self._space = space
        self._cold = cold
        self._wrote = wrote
        self._clock = clock
        self._numbers = itertools.count()
        flags = os.O_WRONLY | os.O_CLOEXEC | io.direct_flag
        self._write_flags = flags | os.O_CREAT | os.O_EXCL
        self._rewrite_flags = flags

    def put(self, pages: Sequence[Page], deadline: float) -> list[PageStatus]:
        """A parent comes before its child."""
        times: Times = {page.text: None for page in pages}
        statuses: list[PageStatus] = []
        for i in range(0, len(pages), GROUP_OBJECTS):
            group = pages[i : i + GROUP_OBJECTS]
            if self._clock() >= deadline:
                statuses += [PageStatus.TIMEOUT] * len(group)
            else:
                statuses += self._put_group(group, times)
        return statuses

    def _put_group(self, pages: Sequence[Page], times: Times) -> list[PageStatus]:
        begun = [self._begin(page, times) for page in pages]
        drafts = [item for item in begun if isinstance(item, _Draft)]
        buffers = [(draft.page.blob.header, draft.page.blob.payload) for draft in drafts]
        results = self._io.write([draft.fd for draft in drafts], buffers)
        # In order, so that a page is never there before the page that it needs.
        finished = [
            self._finish(draft, result, times)
            for draft, result in zip(drafts, results, strict=True)
        ]
        rest = iter(finished)
        return [item if isinstance(item, PageStatus) else next(rest) for item in begun]

    def _begin(self, page: Page, times: Times) -> _Draft | PageStatus:
        """Reserve space and open the temporary file."""
        if page.parent not in times and self._time_for(page, times) is None:
            return PageStatus.ORPHAN
        size_bytes = page.blob.header.nbytes + page.blob.payload.nbytes
        path = self._layout.temporary_path(page.text, next(self._numbers))
        try:
            fd = self._recycle(path, size_bytes)
            if fd is None:
                if not self._space.take(size_bytes, self._budget.evict_one):
                    return PageStatus.REJECTED
                if not self._budget.reserve(size_bytes):
                    return PageStatus.REJECTED
                fd = self._create(path, size_bytes)
        except OSError as error:
            return self._refusal(error)
        return _Draft(page, size_bytes, path, fd)

    def _time_for(self, page: Page, times: Times) -> int | None:
        """A little before what it needs. None: that is not there, or about to go."""
        if page.parent is None:
            return page.used_ns
        if page.parent in times:
            parent_ns = times[page.parent]
        else:
            parent_ns = time_of(self._layout.object_path(page.parent))
            if parent_ns is not None and parent_ns < self._cold.bound_ns:
                return None
        return None if parent_ns is None else min(page.used_ns, parent_ns - STEP_NS)

    def _create(self, path: str, size_bytes: int) -> int:
        try:
            try:
                fd = os.open(path, self._write_flags, 0o644)
            except FileNotFoundError:  # the store was cleared, and the folders are not there yet
                self._layout.make_folders()
                fd = os.open(path, self._write_flags, 0o644)
        except OSError:
            self._budget.release(size_bytes)
            raise
        with contextlib.suppress(OSError):  # what grows while written is written serially
            os.ftruncate(fd, size_bytes)
        return fd

    def _recycle(self, path: str, size_bytes: int) -> int | None:
        """At the budget: the coldest object's file, as the temporary file of the new one.

        Spares the file system removing one file and making another of the same size, which can
        cost more than writing it. Whoever is reading the old object meanwhile finds that it does
        not fit its name.
        """
        if self._budget.recycle(size_bytes, path):
            try:
                return os.open(path, self._rewrite_flags)
            except OSError:
                self._budget.release(size_bytes)
        with contextlib.suppress(FileNotFoundError):  # it may have had another size
            os.unlink(path)
        return None

    def _finish(self, draft: _Draft, num_bytes: int, times: Times) -> PageStatus:
        """Publish what was written, or leave no trace of it."""
        path = self._layout.object_path(draft.page.text)
        time_ns = self._time_for(draft.page, times)
        try:
            try:
                if num_bytes < 0:
                    raise OSError(-num_bytes, os.strerror(-num_bytes))
                if num_bytes != draft.size_bytes:
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
                times[draft.page.text] = there_ns
                status = PageStatus.OK
            else:
                os.rename(draft.path, path)
                times[draft.page.text] = time_ns
                self._wrote(draft.size_bytes)
                return PageStatus.OK
        except OSError as error:
            status = self._refusal(error)
        self._budget.release(draft.size_bytes)
        with contextlib.suppress(OSError):
            os.unlink(draft.path)
        return status

    def _refusal(self, error: OSError) -> PageStatus:
        if error.errno not in _FULL:
            return PageStatus.FAILED
        self._space.refused(error)
        return PageStatus.REJECTED
