"""Sliding-window attention: only the trailing window of a prefix is needed.

A token sees the `tokens` up to and including itself, so a request that goes on at a page boundary
reads the pages that hold the `tokens` - 1 before it, and no others. Any boundary whose window is
complete is a point to go on from; what lies between two such points need not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.components.base import Guard, PoolSize, best_copy, is_ready
from quire.errors import ConfigError
from quire.tree import Node, slot_of
from quire.types import DEVICE


class SlidingWindow:
    name = "window"
    is_point = False

    def __init__(self, index: int, tokens: int, page_size: int, pool: PoolSize) -> None:
        if tokens < 2:
            raise ConfigError(f"a window of {tokens} tokens holds nothing: it must be at least 2")
        self.index = index
        self.pool: PoolSize | None = pool
        self.num_pages = -(-(tokens - 1) // page_size)
        """Pages a window spans at a page boundary."""
        self.kept_pages = self.num_pages + 1
        """Pages kept behind a point: one to spare, so that a request that is a page shorter than
        the one before it (asked again, after a short answer) finds its window whole too."""
        self._device = slot_of(index, DEVICE)

    def deepest(self, path: Sequence[Node], first: int, limit: int, *, host: bool) -> int:
        """A gap makes every boundary unusable from behind its start to a window after its end."""
        boundary, at = limit, len(path) - 1
        while at >= 0 and path[at].start >= limit:
            at -= 1
        node: Node | None = path[at] if at >= 0 else None
        while boundary > first and node is not None and node.parent is not None:
            if node.end <= boundary - self.num_pages:
                break
            if not is_ready(node, self._device, host=host):
                boundary = node.start
            node = node.parent
        return max(first, boundary)

    def protection(self, tail: Node) -> list[Guard]:
        return [guard for node in self.needed(tail) for guard in best_copy(node, self._device)]

    def needed(self, tail: Node) -> list[Node]:
        return self._behind(tail, self.num_pages)

    def kept(self, tail: Node) -> list[Node]:
        """Nodes whose holdings are kept for whoever goes on at `tail`, deepest first."""
        return self._behind(tail, self.kept_pages)

    def _behind(self, tail: Node, count: int) -> list[Node]:
        nodes, first = [], tail.end - count
        node: Node | None = tail
        while node is not None and node.parent is not None and node.end > first:
            nodes.append(node)
            node = node.parent
        return nodes

    def span(self, first: int, boundary: int) -> tuple[int, int]:
        return max(first, boundary - self.num_pages), boundary

    def reachable(self, present: bytes, first: int, limit: int) -> int:
        boundary = limit
        while boundary > first:
            start = self.span(first, boundary)[0]
            gap = present.rfind(b"\0", start - first, boundary - first)
            if gap < 0:
                break
            boundary = first + gap
        return max(first, boundary)
