"""Recurrent layers (Mamba, linear attention, short convolutions): one snapshot at one boundary.

The state after n tokens is of fixed size, says nothing about the state after fewer, and cannot be
wound back. So a prefix can be gone on from exactly where a snapshot was taken, and the snapshot is
all that is needed there. It hangs at the end of a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.components.base import Guard, PoolSize, best_copy, is_ready
from quire.tree import Node, slot_of
from quire.types import DEVICE


class Recurrent:
    name = "recurrent"
    is_point = True

    def __init__(self, index: int, pool: PoolSize) -> None:
        self.index = index
        self.pool: PoolSize | None = pool
        self._device = slot_of(index, DEVICE)

    def deepest(self, path: Sequence[Node], first: int, limit: int, *, host: bool) -> int:
        for node in reversed(path):
            if node.end <= limit and is_ready(node, self._device, host=host):
                return max(first, node.end)
        return first

    def protection(self, tail: Node) -> list[Guard]:
        return best_copy(tail, self._device)

    def needed(self, tail: Node) -> list[Node]:
        return [tail] if tail.parent is not None else []

    def span(self, first: int, boundary: int) -> tuple[int, int]:
        return max(first, boundary - 1), boundary

    def reachable(self, present: bytes, first: int, limit: int) -> int:
        return max(first, first + present.rfind(b"\1", 0, limit - first) + 1)
