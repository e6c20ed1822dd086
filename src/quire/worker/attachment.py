"""Attachment: the store that a worker has attached, and its changes at run time, off the step.

An operation borrows the store when it is submitted and keeps it to its end, whatever is attached or
detached meanwhile; a store that was replaced is closed after its last user. One thread makes all
changes, in the order given, since opening, clearing and closing may block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from quire.errors import QuireError, StoreError
from quire.messages import AttachStore, ClearStore, DetachStore, StoreChanged
from quire.store.base import Pages
from quire.worker.lanes import Lane, Once
from quire.worker.tasks import Reporter


class StoreLease(NamedTuple):
    """Right to use one store until release(), which is called exactly once."""

    store: Pages
    release: Callable[[], None]


class Attachment:
    def __init__(
        self, open_store: Callable[[str], Pages], reporter: Reporter, max_queued: int
    ) -> None:
        self._open_store = open_store
        self._reporter = reporter
        self._lane = Lane("store", 1, max_queued)
        self._lock = threading.Lock()
        self._attached: Pages | None = None
        self._num_uses: Counter[Pages] = Counter()
        """Of every open store; being attached is one."""

    def borrow(self) -> StoreLease | None:
        """The attached store, for one operation; None when there is none."""
        with self._lock:
            store = self._attached
            if store is None:
                return None
            self._num_uses[store] += 1
        return StoreLease(store, lambda: self._release(store))

    def start(self, command: AttachStore | DetachStore | ClearStore) -> None:
        """Ends with one StoreChanged, whatever happens."""

        def act() -> None:
            self._change(command)
            tell("")

        def fail(error: Exception) -> None:
            self._reporter.count_error(error)
            # Ours are sentences already; anything else is at least named.
            sentence = str(error) if isinstance(error, QuireError) else ""
            tell(sentence or f"the store failed: {type(error).__name__}: {error}")

        def cancel() -> None:
            tell("the worker is too busy with other store changes, or closing: try again")

        def tell(error: str) -> None:
            self._reporter.report(StoreChanged(command.op, self._reporter.rank, error))

        if not self._lane.submit(Once(act, fail=fail, cancel=cancel)):
            cancel()

    def close(self, timeout_s: float) -> bool:
        """Detach, after every change already asked for. False if a store hangs."""
        detach = Once(lambda: self._replace(None), fail=self._reporter.count_error)
        self._lane.submit(detach, force=True)
        return self._lane.close(timeout_s, drain=True)

    def _change(self, command: AttachStore | DetachStore | ClearStore) -> None:
        match command:
            case AttachStore(url=url):
                self._replace(self._open_store(url))
            case DetachStore():
                self._replace(None)
            case ClearStore():
                if self._attached is None:  # changed by this thread only
                    raise StoreError(
                        "no store is attached, so there is nothing to clear: attach one first"
                    )
                self._attached.clear()

    def _replace(self, store: Pages | None) -> None:
        with self._lock:
            old, self._attached = self._attached, store
            if store is not None:
                self._num_uses[store] = 1
        if old is not None:
            self._release(old)

    def _release(self, store: Pages) -> None:
        with self._lock:
            self._num_uses[store] -= 1
            assert self._num_uses[store] >= 0, "a store lease was released twice"
            is_last = self._num_uses[store] == 0
            if is_last:
                del self._num_uses[store]
        if is_last:
            self._close(store)

    def _close(self, store: Pages) -> None:
        # The last user may be the step's thread, which must not block: hand it to the lane. A
        # lane that is closing takes nothing more, and then there is no step left to hold up.
        if self._lane.submit(Once(store.close, fail=self._reporter.count_error), force=True):
            return
        try:
            store.close()
        except Exception as error:  # thread boundary: closing one store fails, nothing else
            self._reporter.count_error(error)
