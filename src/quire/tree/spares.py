"""Which host copy goes first: of pages that the device has too, and that nothing is lost without.

A spare copy below which the host has nothing goes at once. One that the host needs for pages below
it takes room twice for their sake:

    device   prompt ── turn 2                 used all the time
    host     prompt ── turn 1's last page     used by nobody since turn 2

They go before it, if they are no more than the copies that this makes free. What went so is
remembered in `Node.given_up` and counts the next time: a prompt below which ever new pages come to
the host soon keeps its copy.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.eviction import EvictionQueue, Retained
from quire.tree.node import Holding, Node
from quire.tree.stays import may_go
from quire.types import DEVICE, HOST, READY

MAX_BELOW = 64
"""Nodes looked at below a spare copy, at most."""


class Spare(NamedTuple):
    holding: Holding
    """What goes next."""
    instead_of: Node | None
    """It is not spare itself: it is given up for the copies of this node and of those below."""


def next_spare(spare: EvictionQueue, slot: int, kept: Retained) -> Spare | None:
    """Most recently used first: the device keeps those longest. Parks those that must stay.
    `kept`: what the slot was asked to keep."""
    while (holding := spare.hottest()) is not None:
        if may_go(holding, slot):
            return Spare(holding, None)
        if slot == HOST and not holding.reasons:
            leaf = _in_the_way(holding.node, spare, kept)
            if leaf is not None:
                return Spare(leaf, holding.node)
        spare.remove(holding)
    return None


def _in_the_way(node: Node, spare: EvictionQueue, kept: Retained) -> Holding | None:
    """The end of a path below `node` on the host, if all that would be lost there is worth it, and
    nobody asked to keep any of it."""
    num_spare, num_lost, num_seen = node.num_pages, node.given_up, 0
    leaf: Holding | None = None
    nodes = [node]
    for above in nodes:
        for child in (above.children or {}).values():
            num_seen += 1
            if num_seen > MAX_BELOW:
                return None
            holding = child.held[HOST]
            if holding is None:
                continue
            nodes.append(child)
            if _is_lost(child, holding, spare):
                if kept.keeps(holding):
                    return None
                num_lost += child.num_pages
            else:
                num_spare += child.num_pages
            if child.host_below == 0:
                leaf = holding
    return leaf if num_lost <= num_spare else None


def _is_lost(node: Node, holding: Holding, spare: EvictionQueue) -> bool:
    """Has only the host this page, or will soon?"""
    device = node.held[DEVICE]
    if device is None or device.state is not READY:
        return True
    return holding.queue is not None and holding.queue is not spare
