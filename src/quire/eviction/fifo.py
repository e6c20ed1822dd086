"""First in, first out: use does not refresh.

A branch is as old as the newest page on it (what hangs below must go first anyway), so a parent
moves behind a child that is inserted under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.eviction.base import EvictionPolicy

if TYPE_CHECKING:
    from quire.tree import Holding


class FIFO(EvictionPolicy):
    def __init__(self) -> None:
        super().__init__(1)

    def touch(self, holding: Holding) -> None:
        # If it is parked, that was at the cold end: it is older than everything still queued.
        self.unpark(holding)
