"""Joining: neighbours that are alike in everything, and that nobody names, become one node.

The way back from splits and from commits in pieces. Joining costs as much as the nodes are long, so
it waits until there are some.
"""

from __future__ import annotations

from quire.tree.node import NUM_TIERS, Holding, Node
from quire.tree.stays import is_leaf
from quire.tree.tree import PrefixTree
from quire.types import DEVICE, HOST, READY, PageIds

GROWING_NODES = 16
RESTING_NODES = 4
"""So many nodes that are alike become one: while a request still makes them longer, and when it has
let go. It is not done for every turn of a talk."""


def rest(tree: PrefixTree, node: Node) -> None:
    """Nobody works on a node any more: what is alike around it becomes one node."""
    if not any(node.held):
        return  # it has left the tree, or become a part of another
    if node.named:  # it stays as it is; what it hangs under need not
        if node.parent is not None:
            _join(tree, node.parent, GROWING_NODES)
        return
    _join(tree, node, RESTING_NODES)
    rest_below(tree, node)


def rest_below(tree: PrefixTree, node: Node) -> None:
    """The same for its child, if it has one alone."""
    if node.children is not None and len(node.children) == 1:
        _join(tree, next(iter(node.children.values())), RESTING_NODES)


def _join(tree: PrefixTree, tail: Node, least: int) -> None:
    """Make one node of `tail` and those right above it that are like it, if these are at
    `least` so many together."""
    if not _has_row(tail, least):
        return
    if not _is_quiet(tail):
        return
    run, upper = [tail], tail.parent
    while upper is not None and _are_alike(tree, upper, run[-1]) and _is_quiet(upper):
        run.append(upper)
        upper = upper.parent
    if len(run) < least:
        return
    tree.stays.catch_up()
    run.reverse()
    top, parent = run[0], run[0].parent
    assert parent is not None
    assert parent.children is not None
    overlap = len(tail.tokens) - tail.num_pages * tree.root_of(tail).page_bytes
    tokens: list[bytes | bytearray] = []
    keys: list[bytes] = []
    for node in run:
        tokens.append(node.tokens[:-overlap] if overlap and node is not tail else node.tokens)
        if node.page_keys is not None:
            keys.append(node.page_keys)
        if node is not tail:
            node.children = None  # else those above the tail would wait for the garbage collector
        tail.hits = max(tail.hits, node.hits)
    tail.tokens = b"".join(tokens)
    tail.page_keys = b"".join(keys) if len(keys) == len(run) else None
    for slot in (DEVICE, HOST):
        _join_holdings(tree, run, slot)
    tail.given_up, tail.last_use = top.given_up, top.last_use
    parent.children[top.name] = tail
    tail.parent, tail.start, tail.name = parent, top.start, top.name
    tree.changes += 1


def _join_holdings(tree: PrefixTree, run: list[Node], slot: int) -> None:
    kept = run[-1].held[slot]
    if kept is None:
        return
    pages: list[bytes] = []
    for node in run:
        holding = node.held[slot]
        assert holding is not None
        pages.append(holding.pages)
        if holding is not kept:
            tree.standing.leave(holding, slot)
            node.held[slot] = None
    kept.pages = PageIds(b"".join(pages))
    if not kept.reasons and is_leaf(run[-1], slot):
        tree.standing.unpark(kept, slot)


def _are_alike(tree: PrefixTree, upper: Node, lower: Node) -> bool:
    """Could they be one node? Nobody stands between them, and all that is known of one holds
    for the other; state of other components, but for what is at the lower's end, they have
    none."""
    if upper.named or upper.parent is None or upper.children is None:
        return False
    if (
        len(upper.children) > 1
        or upper.stored != lower.stored
        or upper.priority != lower.priority
        or upper.retention is not None
        or lower.retention is not None
        or upper.is_mark
        or upper.others_stored
    ):
        return False
    for slot in range(NUM_TIERS, tree.num_slots):
        if upper.held[slot] is not None:
            return False
        if lower.held[slot] is not None and slot not in tree.points:
            return False
    return _are_held_alike(upper.held, lower.held)


def _has_row(tail: Node, least: int) -> bool:
    """Do so many nodes hang in a row, its end included, that nobody names and without a fork?"""
    node = tail
    for _ in range(least - 1):
        above = node.parent
        if above is None or above.parent is None or above.named or len(above.children or ()) > 1:
            return False
        node = above
    return True


def _is_quiet(node: Node) -> bool:
    """Nobody reads, fills or waits for its very pages; what hangs below may be in use."""
    device, host = node.held[DEVICE], node.held[HOST]
    if device is not None and (device.locks or device.state is not READY or device.owes):
        return False
    return host is None or (host.locks == 0 and host.state is READY)


def _are_held_alike(upper: list[Holding | None], lower: list[Holding | None]) -> bool:
    """Do the same tiers have the full pages of both, and may the device let go of both uncopied, or
    of neither?"""
    above, below = upper[DEVICE], lower[DEVICE]
    if (upper[HOST] is None) != (lower[HOST] is None):
        return False
    if above is None or below is None:
        return above is below
    return above.forgiven == below.forgiven
