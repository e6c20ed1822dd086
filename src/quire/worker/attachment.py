"""StoreSlot: which store is attached, who still uses it, and when it may be closed.

Counts users. An operation borrows the store when it is
submitted and keeps it to its end, whatever is attached or detached meanwhile; a store that was
replaced is handed out for closing with its last user.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from quire.store.client import PageStore


@dataclass(slots=True)
class _Attachment:
    store: PageStore
    num_users: int = 0
    retired: bool = False


class StoreLease:
    """Right to use one store until release(), which is called exactly once."""

    def __init__(self, slot: StoreSlot, attachment: _Attachment) -> None:
        self.store = attachment.store
        self._slot = slot
        self._attachment = attachment

    def release(self) -> None:
        self._slot._returned(self._attachment)


class StoreSlot:
    def __init__(self, close_store: Callable[[PageStore], None]) -> None:
        """`close_store` may be called from any thread, also the step's: it must not block."""
        self._close_store = close_store
        self._current: _Attachment | None = None
        self._lock = threading.Lock()

    def borrow(self) -> StoreLease | None:
        with self._lock:
            if self._current is None:
                return None
            self._current.num_users += 1
            return StoreLease(self, self._current)

    def replace(self, store: PageStore | None) -> None:
        """Attach `store` (None: nothing) in place of what is attached now."""
        with self._lock:
            old = self._current
            self._current = None if store is None else _Attachment(store)
            if old is not None:
                old.retired = True
            unused = old is not None and old.num_users == 0
        if old is not None and unused:
            self._close_store(old.store)

    def _returned(self, attachment: _Attachment) -> None:
        with self._lock:
            attachment.num_users -= 1
            assert attachment.num_users >= 0, "a store lease was released twice"
            last = attachment.retired and attachment.num_users == 0
        if last:
            self._close_store(attachment.store)
