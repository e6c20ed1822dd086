"""What a kind of state needs from the tree.

A prefix is usable up to the deepest page boundary at which *every* component is satisfied. Each
component answers that for itself, and says what may be evicted; the tree and the manager ask all
of them and assume none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.eviction.base import Evictable
from quire.tree import Node
from quire.types import Tier

Guard = tuple[int, Node, Node | None]
"""One lock: (slot, tail, stop): the slot's holdings of the nodes from `tail` up to below `stop`
(None: the root). A plain tuple because every request makes several.

Both ends survive splits, and what is locked stays, so unlocking the same triple undoes it.
"""


class Component(Protocol):
    name: str
    index: int
    """Position among the manager's components: its slots in Node.held."""

    def deepest(self, path: Sequence[Node], first: int, limit: int, *, host: bool) -> int:
        """Largest page boundary in [first, limit] at which this component is satisfied.

        `path` holds the nodes from page `first` on, at which it is. `host` = False counts READY
        device pages only, True also those that are READY on the host.
        """

    def protection(self, tail: Node) -> list[Guard]:
        """Locks that keep this component's state along the path to `tail` usable.

        They need not name every node: what hangs below a node on the device holds it there.
        """

    def evictable(self, tier: Tier) -> Evictable:
        """The rule for `tier`: may a READY holding leave it now?"""


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
