"""Grants: which pages others may read now, and who is reading them.

    grant ──▶ OPEN ──revoke──▶ CLOSING (readers left) ──last reader leaves──▶ gone, on_free()
                     └──revoke, no readers──▶ gone, on_free()

Knows pages and counts; no sockets. Any thread may use it; on_free is called without a lock held.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.types import OperationId, PageIds, page_array

_REMEMBERED = 4096

GrantKey = tuple[OperationId, str]
OnFree = Callable[[], None]


@dataclass(slots=True)
class Grant:
    key: GrantKey
    pages: npt.NDArray[np.int32]
    num_readers: int = 0
    on_free: OnFree | None = None
    """Set: CLOSING."""


class Grants:
    def __init__(self) -> None:
        self._open: dict[GrantKey, Grant] = {}
        self._revoked: OrderedDict[GrantKey, None] = OrderedDict()
        """The latest, so that a late reader is told at once and an early one can wait."""
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, op: OperationId, component: str, pages: PageIds) -> bool:
        """False, and nothing done, when there is such a grant already."""
        key = (op, component)
        with self._changed:
            if key in self._open or self._closed:
                return False
            self._open[key] = Grant(key, page_array(pages))
            self._revoked.pop(key, None)
            self._changed.notify_all()
        return True

    def revoke(self, op: OperationId, component: str, on_free: OnFree) -> None:
        """No more readers from here on; on_free is called once, when the last has left."""
        key = (op, component)
        with self._changed:
            grant = self._open.pop(key, None)
            self._revoked[key] = None
            if len(self._revoked) > _REMEMBERED:
                self._revoked.popitem(last=False)
            self._changed.notify_all()
            if grant is not None and grant.num_readers:
                grant.on_free = on_free
                return
        on_free()

    def enter(self, op: OperationId, component: str, wait_s: float) -> Grant | None:
        """To read from it until leave(). A grant that is not there yet is waited for: what told
        the reader of it may have overtaken what tells us."""
        key = (op, component)
        deadline = time.monotonic() + wait_s
        with self._changed:
            while key not in self._open:
                left_s = deadline - time.monotonic()
                if key in self._revoked or self._closed or not left_s > 0:
                    return None
                self._changed.wait(left_s)
            grant = self._open[key]
            grant.num_readers += 1
            return grant

    def leave(self, grant: Grant) -> None:
        with self._changed:
            grant.num_readers -= 1
            on_free = grant.on_free if not grant.num_readers else None
        if on_free is not None:
            on_free()

    def close(self) -> None:
        """Nobody waits for a grant any more, and none is given."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
