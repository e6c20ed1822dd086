"""What simulators, benchmarks and checks look at inside a cache. To be read and never changed:
serving uses none of this, and a manager has no other way in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.components import Component
from quire.manager.fetches import Fetches
from quire.manager.manager import CacheManager
from quire.memory.allocator import PageAllocator
from quire.tree import Node, PrefixTree


class Inspection(NamedTuple):
    tree: PrefixTree
    components: Sequence[Component]
    allocators: Sequence[PageAllocator]
    """By slot."""
    num_commands: int
    """Not given out yet."""
    fetches: Fetches
    quotas: Sequence[int]
    """By slot, pages that one tenant may have cached."""

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        return self.tree.nodes()

    def keys_of(self, node: Node, component: Component) -> bytes:
        """Keys under which a node's pages of a component are known outside."""
        return self.tree.last_key_of(node) if component.is_point else self.tree.keys_of(node)


def inspect(manager: CacheManager) -> Inspection:
    core = manager._core
    return Inspection(
        core.tree,
        core.components,
        core.allocators,
        len(core.outbox),
        manager._fetches,
        core.quotas,
    )
