"""What a kind of state needs from the tree.

A prefix is usable up to the deepest page boundary at which *every* component is satisfied. Each
component answers that for itself, and says which pages of a prefix carry its state; the tree and
the manager ask all of them and assume none, except that `full`, which every model has, comes first
and is what the other components hang on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.tree import Node
from quire.types import DEVICE, DRAINING, HOST, READY, Tier

Guard = tuple[int, Node, Node | None]
"""One lock: (slot, tail, stop): the slot's holdings of the nodes from `tail` up to below `stop`
(None: the root). A plain tuple because every request makes several.

Both ends survive splits, and what is locked stays, so unlocking the same triple undoes it.
"""


class PoolSize(NamedTuple):
    """Pages of one component's pools."""

    device: int
    host: int


class Component(Protocol):
    name: str
    index: int
    """Position among the manager's components: its slots in Node.held."""
    is_point: bool
    """One page at the end of a node, and not one for each of its pages."""
    pool: PoolSize | None
    """Its pools; None: the sizes of CacheConfig."""

    def deepest(self, path: Sequence[Node], first: int, limit: int, *, host: bool) -> int:
        """Largest page boundary in [first, limit] at which this component is satisfied.

        `path` holds the nodes from page `first` on, at which it is. `host` = False counts READY
        device pages only, True also those that are READY on the host.
        """

    def protection(self, tail: Node) -> list[Guard]:
        """Locks that keep this component's state along the path to `tail` usable.

        They need not name every node: what hangs below a node on the device holds it there.
        """

    def needed(self, tail: Node) -> list[Node]:
        """Nodes whose holdings a request that goes on after `tail` reads, deepest first."""

    def span(self, first: int, boundary: int) -> tuple[int, int]:
        """Of the pages [first, boundary): those whose state is needed to go on at `boundary`,
        where `first` is satisfied."""

    def reachable(self, present: bytes, first: int, limit: int) -> int:
        """`deepest` by what a store has: present[i] tells of page first + i."""


def usable_pages(
    components: Sequence[Component], path: Sequence[Node], first: int, limit: int, *, host: bool
) -> int:
    """Deepest boundary at which all components are satisfied: lower the limit until all agree."""
    while True:
        agreed = limit
        for component in components:
            agreed = component.deepest(path, first, agreed, host=host)
        if agreed == limit or len(components) == 1:
            return agreed
        limit = agreed


def is_ready(node: Node, slot: int, *, host: bool) -> bool:
    """Does the device hold it, readable; or, with `host`, the host? `slot` is the device's."""
    holding = node.held[slot]
    if holding is not None and holding.state is READY:
        return True
    holding = node.held[slot + HOST] if host else None
    return holding is not None and holding.state is READY


def best_copy(node: Node, slot: int) -> list[Guard]:
    """Locks on the copy a request at `node` would use: the device's, or else the host's; and on
    both while the device's is on its way, since it may never arrive."""
    assert slot % len(Tier) == DEVICE
    guards: list[Guard] = []
    for at in (slot, slot + HOST):
        holding = node.held[at]
        if holding is not None and holding.state is not DRAINING:
            guards.append((at, node, node.parent))
            if holding.state is READY:
                break
    return guards
