"""Stays: which holdings must stay where they are, and how many pages may go.

A holding of full pages may leave its tier when nobody locks it, its bytes are READY, and nothing
below it in the same tier must stay; it leaves as a leaf of its tier, last page first. So a tier
gives up ends of paths only, and what remains of it is made of prefixes.

The host never depends on the device: a device holding without which host pages would be of no
use, and of which the host has no copy, *owes* that copy and stays until the host has it:

    full pages         the host has pages right below the node and lacks the node's own
    window, snapshot   the host has the node's full pages and lacks the state that goes with them,
                       which no request uses any more

`owing` names those, for whoever makes copies. While the host has no room for the copy, the debt is
forgiven: then the pages go for want of host memory, and for no other reason.

`movable` counts, slot by slot, the pages that may go: it is known before anything is evicted
whether that would be enough. A reason that comes or goes costs a walk up to the first ancestor that
stays anyway. What is held by one is soon let go, and held by the next, a request's pages by their
backup and that by their write: so counting is put off until somebody wants to know what may go
(`catch_up`), and what has come and gone by then costs no walk at all.
"""

from __future__ import annotations

from quire.tree.node import NUM_TIERS, Holding, Node
from quire.tree.standing import Standing
from quire.types import DEVICE, DRAINING, HOST, PAGE_ID_BYTES, READY, num_pages


class Stays:
    def __init__(self, num_slots: int, standing: Standing) -> None:
        self._standing = standing
        self._other_devices = range(NUM_TIERS, num_slots, NUM_TIERS)
        self.movable = [0] * num_slots
        """Pages by slot that eviction could free now."""
        self.owing: dict[tuple[Node, int], None] = {}
        """Node and device slot of every holding that owes the host a copy."""
        self._put_off: list[dict[Holding, int]] = [{}, {}]
        """Of full pages, by slot: reasons that came, or went (less than 0), not counted yet."""

    def hold_back(self, holding: Holding, slot: int) -> None:
        """One more reason for a holding to stay."""
        if slot > HOST:
            self._count(holding, slot, 1)
            return
        put_off = self._put_off[slot]
        if change := put_off.pop(holding, 0) + 1:
            put_off[holding] = change

    def let_go(self, holding: Holding, slot: int) -> None:
        """One reason less. What may go is found again by eviction."""
        if slot > HOST:
            self._count(holding, slot, -1)
            return
        put_off = self._put_off[slot]
        if change := put_off.pop(holding, 0) - 1:
            put_off[holding] = change

    def catch_up(self) -> None:
        """From here on `reasons` and `movable` are as they should be."""
        for slot, changes in enumerate(self._put_off):
            if changes:
                self._put_off[slot] = {}
                for holding, change in changes.items():
                    if change > 0:
                        self._count(holding, slot, change)
                for holding, change in changes.items():
                    if change < 0:
                        self._count(holding, slot, change)

    def _count(self, holding: Holding, slot: int, change: int) -> None:
        """So many reasons more or less; what had none, or has none any more, is one for what it
        hangs under."""
        at: Holding | None = holding
        size = 0
        while at is not None:
            before, after = at.reasons, at.reasons + change
            at.reasons = after
            if before and after:
                break
            size += len(at.pages)
            change = 1 if after else -1
            if not after and at.queue is None and is_leaf(at.node, slot):
                self._standing.unpark(at, slot)
            above = at.node.parent
            at = None if above is None or slot > HOST else above.held[slot]
        self.movable[slot] -= change * size // PAGE_ID_BYTES

    def enter(self, node: Node, slot: int, holding: Holding) -> None:
        """A holding was attached."""
        parent = node.parent
        assert parent is not None
        if slot == DEVICE:
            parent.device_below += 1
        elif slot == HOST:
            parent.host_below += 1
            if node.host_below and node.children is not None:
                below = (child.held[slot] for child in node.children.values())
                holding.reasons = sum(h is not None and h.reasons > 0 for h in below)
        if not holding.reasons:
            self.movable[slot] += len(holding.pages) // PAGE_ID_BYTES
        elif (above := parent.held[slot]) is not None:
            self.hold_back(above, slot)
        if holding.state is not READY:
            self.hold_back(holding, slot)
        if slot != DEVICE or node.host_below:
            self._reckon_around(node, slot)

    def leave(self, node: Node, slot: int, holding: Holding) -> None:
        """A holding was detached."""
        if holding.owes:
            self._settle(node, slot, holding)
        if not holding.reasons:
            self.movable[slot] -= num_pages(holding.pages)
        parent = node.parent
        assert parent is not None
        if slot <= HOST:
            if slot == DEVICE:
                parent.device_below -= 1
            else:
                parent.host_below -= 1
            above = parent.held[slot]
            if holding.reasons and above is not None:
                self.let_go(above, slot)
            if above is not None and above.queue is None and may_go(above, slot):
                self._standing.unpark(above, slot)
        if slot != DEVICE or node.host_below:
            self._reckon_around(node, slot)

    def forgive(self, node: Node, slot: int) -> None:
        """The host cannot take the copy that a device holding owes."""
        holding = node.held[slot]
        if holding is not None and holding.owes:
            holding.forgiven = True
            self.reckon(node, slot)

    def claim(self, node: Node, slot: int) -> None:
        """The host could take the copy now that it could not take before."""
        holding = node.held[slot]
        if holding is not None:
            holding.forgiven = False
            self.reckon(node, slot)

    def reckon(self, node: Node, slot: int) -> None:
        """Does a device holding owe the host a copy now?"""
        holding = node.held[slot]
        if holding is None or slot % NUM_TIERS == HOST:
            return
        owes = _owes(node, slot, holding) and not holding.forgiven
        if owes != holding.owes:
            holding.owes = owes
            if owes:
                self.owing[node, slot] = None
                self.hold_back(holding, slot)
            else:
                del self.owing[node, slot]
                self.let_go(holding, slot)

    def _settle(self, node: Node, slot: int, holding: Holding) -> None:
        """What owed is gone, with its debt."""
        del self.owing[node, slot]
        holding.owes = False
        holding.reasons -= 1
        if not holding.reasons:  # as if it had been let go, of a holding that no longer stands
            self.movable[slot] += num_pages(holding.pages)
            above = None if slot != DEVICE or node.parent is None else node.parent.held[slot]
            if above is not None:
                self.let_go(above, slot)

    def _reckon_around(self, node: Node, slot: int) -> None:
        """What the host holds of a node has changed: so may what the device owes."""
        if slot == HOST:
            device, parent = node.held[DEVICE], node.parent
            if device is not None and (device.owes or node.host_below):
                self.reckon(node, DEVICE)
            if parent is not None and parent.held[HOST] is None:  # else it owes nothing
                self.reckon(parent, DEVICE)
            for other in self._other_devices:
                self.reckon(node, other)
        else:
            self.reckon(node, slot - slot % NUM_TIERS)


def is_leaf(node: Node, slot: int) -> bool:
    """Is nothing right below it in the same tier? Of full pages; other state has no below."""
    if slot == DEVICE:
        return node.device_below == 0
    return slot != HOST or node.host_below == 0


def may_go(holding: Holding, slot: int) -> bool:
    """May a READY holding leave now?"""
    return holding.reasons == 0 and is_leaf(holding.node, slot)


def _owes(node: Node, slot: int, holding: Holding) -> bool:
    if holding.state is DRAINING or node.held[slot + HOST] is not None:
        return False
    if slot == DEVICE:
        return node.host_below > 0
    return node.held[HOST] is not None and not holding.locks
