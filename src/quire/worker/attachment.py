"""StoreSlot: which store is attached, who still uses it, and when it may be closed.

Knows the client protocol of L3 and counts users. An operation borrows the store when it is
submitted and keeps it to its end, whatever is attached or detached meanwhile; a store that was
replaced is handed out for closing with its last user.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.store.base import Part
from quire.types import PageKey, PageStatus


class PageStoreClient(Protocol):
    """What a worker needs of L3: pages in, pages out, verified. Thread-safe."""

    def contains_prefix(
        self, part: Part, queries: list[list[PageKey]], *, deadline: float
    ) -> list[int]: ...

    def contains_each(
        self, part: Part, queries: list[list[PageKey]], *, deadline: float
    ) -> list[bytes]: ...

    def touch(
        self, part: Part, keys: Sequence[PageKey], *, used_ns: int, each: bool = False
    ) -> None: ...

    def get(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        cancelled: Callable[[], bool],
        touch: bool,
    ) -> list[PageStatus]: ...

    def put(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        parents: Sequence[PageKey],
        used_ns: int,
        cancelled: Callable[[], bool],
    ) -> list[PageStatus]: ...

    def clear(self) -> None: ...

    def counters(self) -> dict[str, int]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Attachment:
    store: PageStoreClient
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
    def __init__(self, close_store: Callable[[PageStoreClient], None]) -> None:
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

    def replace(self, store: PageStoreClient | None) -> None:
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
