"""StoreAdmin: attach, detach and clear a worker's store at run time, off the step.

Knows the slot that holds the store and one thread, so changes take effect in the order given.
Opening, clearing and closing may all block: each happens on that thread.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import QuireError, StoreError
from quire.messages import AttachStore, ClearStore, DetachStore, StoreChanged
from quire.store.client import PageStore
from quire.worker.attachment import StoreLease, StoreSlot
from quire.worker.lanes import Lane, Once
from quire.worker.tasks import Reporter


class StoreAdmin:
    def __init__(
        self, open_store: Callable[[str], PageStore], reporter: Reporter, max_queued: int
    ) -> None:
        self._open_store = open_store
        self._reporter = reporter
        self._slot = StoreSlot(self._close_store)
        self._lane = Lane("admin", 1, max_queued)

    def borrow(self) -> StoreLease | None:
        """The attached store, for one operation; None when there is none."""
        return self._slot.borrow()

    def start(self, command: AttachStore | DetachStore | ClearStore) -> None:
        """Ends with one StoreChanged, whatever happens."""
        action = self._action(command)

        def act() -> None:
            action()
            tell("")

        def fail(error: Exception) -> None:
            self._reporter.count_error(error)
            # Ours are sentences already; anything else is at least named.
            sentence = str(error) if isinstance(error, QuireError) else ""
            tell(sentence or f"the store failed: {type(error).__name__}: {error}")

        def abandon() -> None:
            tell("the worker is too busy with other store changes, or closing: try again")

        def tell(error: str) -> None:
            self._reporter.report(StoreChanged(command.op, self._reporter.rank, error))

        task = Once(act, fail=fail, abandon=abandon)
        if not self._lane.submit(task):
            task.abandon()

    def close(self, timeout_s: float) -> bool:
        """Detach, after every change already asked for. False if a store hangs."""
        detach = Once(lambda: self._slot.replace(None), fail=self._reporter.count_error)
        self._lane.submit(detach, force=True)
        return self._lane.close(timeout_s, drain=True)

    def _action(self, command: AttachStore | DetachStore | ClearStore) -> Callable[[], None]:
        match command:
            case AttachStore(url=url):
                return lambda: self._slot.replace(self._open_store(url))
            case DetachStore():
                return lambda: self._slot.replace(None)
            case ClearStore():
                return self._clear

    def _clear(self) -> None:
        lease = self._slot.borrow()
        if lease is None:
            raise StoreError("no store is attached, so there is nothing to clear: attach one first")
        try:
            lease.store.clear()
        finally:
            lease.release()

    def _close_store(self, store: PageStore) -> None:
        # The last user may be the step's thread, which must not block: hand it to the lane. A
        # lane that is closing takes nothing more, and then there is no step left to hold up.
        if self._lane.submit(Once(store.close, fail=self._reporter.count_error), force=True):
            return
        try:
            store.close()
        except Exception as error:  # thread boundary: closing one store fails, nothing else
            self._reporter.count_error(error)
