"""Upkeep: what goes when something else goes, for caches of more than one component.

    lost                                     goes with it, and why
    `full` in its last tier                  all else of the node (the tree sees to it): nothing
                                             can be gone on from without it
    the last copy of a window or snapshot    leaves that cannot be gone on from any more, up to the
                                             next node that can, or that others hang below: full
                                             pages nobody can reach are dead weight
    (nothing: a path has grown)              window pages that no point to go on from needs

A *point* is a node somebody may go on from: a leaf, a fork, a node with a snapshot, or one where a
request was seen to branch off. Windows are kept behind points only, so a session without forks
holds one window, at its end.

Knows the tree and the components; moves no pages itself: what it detaches, the caller frees.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.components import Component, SlidingWindow, recurrent_of, window_of
from quire.components.base import is_ready
from quire.tree import Freed, Node, PrefixTree, slot_of
from quire.types import DEVICE, HOST, READY, Tier


class Upkeep:
    def __init__(self, tree: PrefixTree, components: Sequence[Component]) -> None:
        self._tree = tree
        self._components = components
        self._window = window_of(components)
        recurrent = recurrent_of(components)
        self._snapshots = [] if recurrent is None else [slot_of(recurrent.index, t) for t in Tier]

    def tidy(self, node: Node) -> list[Freed]:
        """Let go of what the path to `node` no longer needs; it may be gone itself."""
        node = _still_there(node)
        freed = self.trim(node)
        if self._window is not None:
            freed += self._release_windows(_still_there(node), self._window)
        return freed

    def after(self, lost: Sequence[Freed]) -> list[Freed]:
        """Remove what became useless with what was lost."""
        freed: list[Freed] = []
        for item in lost:
            if not item.was_last:
                continue
            node = item.node
            if self._window is not None and item.slot // len(Tier) == self._window.index:
                for leaf in self._leaves_within(node, node.end + self._window.num_pages):
                    freed += self.tidy(leaf)
            else:  # a leaf, or a point, less
                freed += self.tidy(node)
        return freed

    def _leaves_within(self, node: Node, end: int) -> list[Node]:
        """Leaves at or below `node` whose window could reach back to it."""
        leaves, stack = [], [node]
        while stack:
            at = stack.pop()
            if at.children is None:
                leaves.append(at)
            elif at.end < end:
                stack += at.children.values()
        return leaves

    def trim(self, node: Node) -> list[Freed]:
        """Remove leaves that nobody can go on from, from `node` upwards."""
        freed: list[Freed] = []
        while node.parent is not None and node.children is None and any(node.held):
            busy = any(h is not None and (h.locks or h.state is not READY) for h in node.held)
            if busy or self.is_usable(node):
                break
            parent = node.parent
            for slot in (DEVICE, HOST):
                if node.held[slot] is not None:
                    freed += self._tree.detach(node, slot)
            node = parent
        return freed

    def is_usable(self, node: Node) -> bool:
        """Could a request go on after `node`, with what the device and the host have?"""
        path = [node]
        return all(
            c.deepest(path, node.start, node.end, host=True) == node.end for c in self._components
        )

    def cut_at_window(self, tail: Node) -> None:
        """Make a node begin where the window of `tail` does, so that the rest can go."""
        window = self._window
        if window is None or tail.parent is None:
            return
        last = window.kept(tail)[-1]
        if last.start < (first := tail.end - window.kept_pages):
            slot = slot_of(window.index, DEVICE)
            if last.held[slot] is not None or last.held[slot + HOST] is not None:
                self._tree.split(last, first - last.start)

    def _release_windows(self, node: Node, window: SlidingWindow) -> list[Freed]:
        """Detach window pages above `node` that no point needs."""
        freed: list[Freed] = []
        size, slots = window.kept_pages, [slot_of(window.index, tier) for tier in Tier]
        needed_from, at = self._point_below(node, node.end + size).end - size, node
        while at.parent is not None:
            if self._is_point(at):
                needed_from = at.end - size
            held = [holding for slot in slots if (holding := at.held[slot]) is not None]
            # A gap ends it, beyond what `node` itself needed as long as it was a point.
            if not held and at.end <= min(needed_from, node.end - size):
                break
            above = at.parent
            # Who stands on one copy may want the other, should that one go.
            if held and at.start < needed_from and not any(holding.locks for holding in held):
                whole = at.end <= needed_from
                unneeded = at if whole else self._tree.split(at, needed_from - at.start)
                for slot in slots:
                    if is_ready(unneeded, slot, host=False):
                        freed += self._tree.detach(unneeded, slot)
            at = above
        return freed

    def _point_below(self, node: Node, limit: int) -> Node:
        """The nearest point at or below a node, or whatever ends at page `limit` or behind it."""
        while not self._is_point(node) and node.end < limit:
            assert node.children is not None
            node = next(iter(node.children.values()))
        return node

    def _is_point(self, node: Node) -> bool:
        children = node.children
        return (
            children is None
            or len(children) > 1
            or node.is_mark
            or any(node.held[slot] is not None for slot in self._snapshots)
        )

    def is_needed(self, node: Node) -> bool:
        """Is there a point that needs the node's window pages, all of them?"""
        window = self._window
        assert window is not None
        last = node.start + window.kept_pages
        return self._point_below(node, last + 1).end <= last


def _still_there(node: Node) -> Node:
    """The node, or if it is gone its next ancestor that is not."""
    while node.parent is not None and not any(node.held):
        node = node.parent
    return node
