"""outline(): the prefix tree as a person may look at it: runs of pages, where they are, how warm.

Reads and changes nothing. No token leaves: a run is told by where it begins and ends.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.manager.core import Core
from quire.tree import Node
from quire.types import DEVICE, HOST, READY


class TreeRun(NamedTuple):
    """One node: pages [first, last) of every prompt below it."""

    parent: int
    """Its number in the outline; −1: it begins a prompt."""
    tenant: str
    """Whose it is; empty: of those without a salt."""
    first: int
    last: int
    device: bool
    host: bool
    store: bool
    hits: int
    age: int
    """Uses of other paths since it was used last."""


def outline(core: Core, limit: int) -> list[TreeRun]:
    """At most so many runs, those near the root first."""
    runs: list[TreeRun] = []
    waiting: list[tuple[int, str, Node]] = [
        (-1, root.tenant.name, child)
        for root in core.tree.roots.values()
        for child in (root.children or {}).values()
    ]
    at = 0
    while at < len(waiting) and len(runs) < limit:
        parent, tenant, node = waiting[at]
        at += 1
        device, host = (
            holding is not None and holding.state is READY
            for holding in (node.held[DEVICE], node.held[HOST])
        )
        is_stored = node.stored == core.store_epoch != 0
        age = core.tree.uses - node.last_use
        runs.append(
            TreeRun(parent, tenant, node.start, node.end, device, host, is_stored, node.hits, age)
        )
        below = (node.children or {}).values()
        waiting += [(len(runs) - 1, tenant, child) for child in below]
    return runs
