"""Full attention: every page of the prefix is needed, so a match is the run without a gap."""

from __future__ import annotations

from collections.abc import Sequence

from quire.components.base import Guard, Step
from quire.tree import Holding, Node, slot_of
from quire.types import Residency, Tier


class FullAttention:
    name = "full"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._device = slot_of(index, Tier.DEVICE)
        self._host = slot_of(index, Tier.HOST)

    def deepest(self, path: Sequence[Step], first: int, limit: int, *, host: bool) -> int:
        reached = first
        for node, end in path:
            holding = node.held[self._device]
            if holding is None or holding.state is not Residency.READY:
                holding = node.held[self._host] if host else None
            if holding is None or holding.state is not Residency.READY:
                break
            reached = end
            if reached >= limit:
                return limit
        return reached

    def protection(self, tail: Node) -> list[Guard]:
        """The lowest device copy on the path, and the host copies from there to the tail.

        The device copies above the lowest one have a branch below them, so they stay as well.
        Host copies are named one by one: each could become spare, and go, if a load made its
        page READY on the device.
        """
        boundary = tail
        while boundary.parent is not None and boundary.held[self._device] is None:
            boundary = boundary.parent
        guards = []
        if boundary is not tail:
            guards.append(Guard(self._host, tail, boundary))
        if boundary.parent is not None:
            guards.append(Guard(self._device, boundary, boundary.parent))
        return guards

    def may_evict(self, holding: Holding, tier: Tier) -> bool:
        """Leaves first, so that what remains is always a usable prefix.

        On the device a leaf has no child on the device. On the host a page that the device has
        too may go from anywhere; one that only the host has must have nothing below it.
        """
        if holding.locks:
            return False
        if tier is Tier.DEVICE:
            return holding.branches == 0
        device = holding.node.held[self._device]
        if device is not None and device.state is Residency.READY:
            return True
        return holding.node.children is None
