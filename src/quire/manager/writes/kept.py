"""Kept: which paths the store was asked to keep, and until when.

A store gives up what was used longest ago: to keep a path is to say every few seconds that it is
used. That is all that goes for every store, and it ends by itself when nobody says it any more.
Knows ends of paths, also of those that have left the tree; saying it is the writer's business.
"""

from __future__ import annotations

from quire.tree import Node, PrefixTree


class Kept:
    def __init__(self, tree: PrefixTree, max_pages: int) -> None:
        """`max_pages`: of more, those asked for longest ago are paths as any other."""
        self._tree = tree
        self._max_pages = max_pages
        self.until: dict[Node, float] = {}
        """By the end of a path, asked for longest ago first."""
        self._sizes: dict[Node, int] = {}
        """Pages of each path, when it was asked for: it may have grown since."""
        self._num_pages = 0

    def ask(self, tail: Node, until_s: float) -> None:
        for node in self._tree.path(tail):
            if self.until.get(node, until_s) <= until_s:
                self._drop(node)  # the longer path passes it
        self._drop(tail)
        self.until[tail], self._sizes[tail] = until_s, tail.end
        self._num_pages += tail.end
        while self._num_pages > self._max_pages:
            self._drop(next(iter(self.until)))

    def tails(self, now: float) -> list[Node]:
        """Ends of the paths whose time is not over; the others are forgotten."""
        for node in [node for node, until_s in self.until.items() if until_s <= now]:
            self._drop(node)
        return list(self.until)

    def clear(self) -> None:
        """Nothing can be said any more."""
        self.until.clear()
        self._sizes.clear()
        self._num_pages = 0

    def _drop(self, tail: Node) -> None:
        if self.until.pop(tail, None) is not None:
            self._num_pages -= self._sizes.pop(tail)
