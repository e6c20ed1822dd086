"""Full attention: every page of the prefix is needed, so a match is the run without a gap."""

from __future__ import annotations

from collections.abc import Sequence

from quire.components.base import Guard, PoolSize
from quire.tree import Holding, Node, slot_of
from quire.types import DEVICE, DRAINING, HOST, READY


class FullAttention:
    name = "full"
    index = 0
    is_point = False
    pool: PoolSize | None = None

    def __init__(self) -> None:
        self._device = slot_of(self.index, DEVICE)
        self._host = slot_of(self.index, HOST)

    def deepest(self, path: Sequence[Node], first: int, limit: int, *, host: bool) -> int:
        reached, device = first, self._device
        for node in path:
            holding = node.held[device]
            if holding is None or holding.state is not READY:
                holding = node.held[self._host] if host else None
                if holding is None or holding.state is not READY:
                    break
            reached = node.end
        return reached if reached < limit else limit

    def protection(self, tail: Node) -> list[Guard]:
        """The lowest device copy on the path, and the host copies from the lowest that is READY to
        the tail.

        The device copies above the lowest one have a branch below them, so they stay as well.
        Host copies are named one by one: each could become spare, and go, if a load made its
        page READY on the device.
        """
        device = tail.held[self._device]
        if device is not None and device.state is READY:  # what nearly every call finds
            return [(self._device, tail, tail.parent)]
        lowest = tail
        while lowest.parent is not None and not _counts(lowest.held[self._device]):
            lowest = lowest.parent
        guards = self._host_copies(tail)
        if lowest.parent is not None:
            guards.append((self._device, lowest, lowest.parent))
        return guards

    def _host_copies(self, tail: Node) -> list[Guard]:
        """Those from the lowest READY device copy to the tail. What is still on its way to the
        device may never arrive: then the host's is needed."""
        guards: list[Guard] = []
        node, run = tail, None
        while node.parent is not None:
            device = node.held[self._device]
            if device is not None and device.state is READY:
                break
            host = node.held[self._host]
            there = host is not None and host.state is not DRAINING
            if there and run is None:
                run = node
            elif not there and run is not None:
                guards.append((self._host, run, node))
                run = None
            node = node.parent
        if run is not None:
            guards.append((self._host, run, node))
        return guards

    def needed(self, tail: Node) -> list[Node]:
        nodes, node = [], tail
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes

    def span(self, first: int, boundary: int) -> tuple[int, int]:
        return first, boundary

    def reachable(self, present: bytes, first: int, limit: int) -> int:
        gap = present.find(b"\0", 0, limit - first)
        return limit if gap < 0 else first + gap


def _counts(device: Holding | None) -> bool:
    """Is it there, or on its way? What drains is of no use, and nobody new may keep it alive."""
    return device is not None and device.state is not DRAINING
