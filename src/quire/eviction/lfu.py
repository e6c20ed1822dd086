"""Least frequently used goes first; among equals, the least recently used.

Hit counts are capped, so that finding the lowest occupied level costs at most `LEVELS` looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.eviction.base import EvictionPolicy, EvictionQueue

if TYPE_CHECKING:
    from quire.tree import Holding

LEVELS = 32


class LFU(EvictionPolicy):
    def __init__(self) -> None:
        super().__init__(LEVELS)

    def queue_for(self, holding: Holding) -> EvictionQueue:
        return self._queues[min(holding.node.hits, LEVELS - 1)]
