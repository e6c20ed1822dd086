"""Backlog: pages that are to be written to a slow store, when it is their turn.

Holds copies, up to so many bytes, since the pages themselves are needed for other things
meanwhile. What does not fit is not written: a cache may forget. One thread, in the order given, so
that a page comes after the one that it needs.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from quire.store.base import Part
from quire.store.client import PageStore
from quire.store.counters import StoreCounters
from quire.types import Owner, PageKey, PageStatus

_WRITE_S = 30.0
_MAX_ORPHANS = 4096


class PutCall(NamedTuple):
    """What put() is called with."""

    part: Part
    keys: Sequence[PageKey]
    pages: Sequence[memoryview]
    parents: Sequence[PageKey]
    """Of each page, or none at all."""
    used_ns: int | None
    owners: Sequence[Owner | None] = ()
    """The same as of parents."""

    @property
    def size_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)

    def to(self, store: PageStore, deadline: float) -> list[PageStatus]:
        return store.put(
            self.part,
            self.keys,
            self.pages,
            deadline=deadline,
            parents=self.parents,
            owners=self.owners,
            used_ns=self.used_ns,
        )


class _Waiting(NamedTuple):
    call: PutCall
    """Of copies."""
    held: ExitStack
    """While it is open, what is disowned of them is not written."""


class Backlog:
    def __init__(self, pages: PageStore, *, clock: Callable[[], float], max_bytes: int) -> None:
        self._pages = pages
        self._clock = clock
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._calls: deque[_Waiting] = deque()
        self._held_bytes = 0
        self._closed = False
        self._orphans: dict[PageKey, None] = {}
        """Pages that were turned away for want of the page before them."""
        self.counters = StoreCounters("back_pages", "back_dropped_pages")
        self._thread = threading.Thread(target=self._work, name="quire-backlog", daemon=True)
        self._thread.start()

    def add(self, call: PutCall) -> bool:
        """False: there is no room for its pages."""
        with self._changed:
            fits = not self._closed and self._held_bytes + call.size_bytes <= self._max_bytes
            if fits:
                self._held_bytes += call.size_bytes
        waiting = self._copied(call) if fits else None
        what = "back_dropped_pages" if waiting is None else "back_pages"
        self.counters.add({what: len(call.keys)})
        if waiting is None:
            return False
        with self._changed:
            self._calls.append(waiting)
            self._changed.notify_all()
        return True

    def _copied(self, call: PutCall) -> _Waiting | None:
        """None: there is no memory for copies, and their room here is free again."""
        with ExitStack() as held:
            held.enter_context(self._pages.writing(call.part, call.keys))
            try:
                copied = call._replace(pages=[_copy(page) for page in call.pages])
            except (OSError, MemoryError):
                with self._changed:
                    self._held_bytes -= call.size_bytes
                    self._changed.notify_all()
                return None
            return _Waiting(copied, held.pop_all())

    def misses(self, parent: PageKey) -> bool:
        """Was this page turned away here, so that its whole path should be written again? Said
        once."""
        with self._changed:
            return self._orphans.pop(parent, False) is None

    def close(self, timeout_s: float) -> None:
        """What is left is written, for so long; the rest is forgotten."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._held_bytes, timeout_s)
            self._calls.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (waiting := self._next()) is not None:
            call = waiting.call
            with waiting.held:
                statuses = call.to(self._pages, self._clock() + _WRITE_S)
            with self._changed:
                for key, status in zip(call.keys, statuses, strict=True):
                    if status is PageStatus.ORPHAN:
                        self._orphans[key] = None
                while len(self._orphans) > _MAX_ORPHANS:
                    del self._orphans[next(iter(self._orphans))]
                self._held_bytes -= call.size_bytes
                self._changed.notify_all()

    def _next(self) -> _Waiting | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            return self._calls.popleft() if self._calls else None


def _copy(page: memoryview) -> memoryview:
    copy = memoryview(mmap.mmap(-1, page.nbytes))  # block-aligned, as a host page is
    copy[:] = page
    return copy
