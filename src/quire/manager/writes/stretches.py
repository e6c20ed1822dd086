"""PathStretch: one node of a backup or a write, which the tree may cut while it is under way."""

from __future__ import annotations

import msgspec

from quire.components import Component
from quire.manager.core import Core
from quire.manager.operations import Operation
from quire.tree import Node


class PathStretch(msgspec.Struct, eq=False):
    """Remembered as (its end, its first page): survives splits."""

    tail: Node
    first: int
    attempt: int = 0
    """Tries made before this one."""
    cold: bool = False
    """Backups: due because the device will soon let go of it."""
    urgent: bool = False
    """Backups: somebody waits for it, or the host cannot do without it."""

    def of(self, node: Node) -> PathStretch:
        """The same for one of its nodes, or one above it."""
        if node is self.tail and node.start == self.first:
            return self
        return PathStretch(node, node.start, self.attempt, self.cold, self.urgent)

    def nodes(self, component: Component) -> list[Node]:
        """The node, or what it was split into, parents first; of a point, its end."""
        node, first = self.tail, self.first
        nodes = [node]
        while node.start > first and node.parent is not None and not component.is_point:
            node = node.parent
            nodes.insert(0, node)
        return nodes


StretchOutcome = tuple[PathStretch, Node, int, bytes]
"""A node of an operation, its pages, and what became of them; no statuses: all is well. A plain
tuple because every request makes some."""


def outcomes_of(
    core: Core, component: Component, op: Operation, stretches: list[PathStretch]
) -> list[StretchOutcome]:
    """Every node of an operation that has ended, as it is cut now."""
    statuses, at = b"" if op.all_ok() else op.page_statuses(), 0
    outcomes: list[StretchOutcome] = []
    is_point = component.is_point
    for stretch in stretches:
        for node in stretch.nodes(component):
            size = 1 if is_point else node.end - node.start
            mine = b""
            if statuses:
                mine = statuses[at : at + size]
                core.count_faults(op.kind, mine)
            outcomes.append((stretch, node, size, mine))
            at += size
    return outcomes


def size_of(component: Component, node: Node) -> int:
    """Pages that a component has of a node."""
    return 1 if component.is_point else node.end - node.start
