"""Standing: where each READY holding ranks when its tier needs room.

Device holdings, and host holdings that the device lacks, stand in their slot's eviction policy, or
apart from it if somebody asked for that (eviction/retained.py). A host holding whose pages are
READY on the device as well is *spare*: it goes before any other (see spares.py). Once the device is
about to let go of a page, its host copy is ranked as if that had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from quire.eviction import Evictable, EvictionPolicy, EvictionQueue, Retained
from quire.tree.node import NUM_TIERS, Holding, Node
from quire.types import DEVICE, HOST, READY, Tier


class Standing:
    def __init__(
        self,
        num_components: int,
        make_order: Callable[[int, Tier], EvictionPolicy],
        clock: Callable[[], float],
        max_retained: Sequence[int],
    ) -> None:
        self.orders = [make_order(c, tier) for c in range(num_components) for tier in Tier]
        """Policy per slot."""
        self.retained = [
            Retained(order, slot % NUM_TIERS, clock, max_retained[slot])
            for slot, order in enumerate(self.orders)
        ]
        """Per slot, what stands apart from that policy."""
        self.spare = [EvictionQueue() for _ in range(num_components)]
        """Spare host holdings per component."""
        self._device_slots = range(0, num_components * NUM_TIERS, NUM_TIERS)

    def enter(self, holding: Holding, slot: int) -> None:
        """The holding has become READY."""
        node = holding.node
        twin = node.held[slot ^ 1]  # in the other tier
        if twin is None or twin.state is not READY:
            self._rank(holding, slot)
        elif slot % NUM_TIERS == DEVICE:
            self._rank(holding, slot)
            self.leave(twin, slot + HOST)
            self.spare[slot // NUM_TIERS].push_hot(twin)
        else:
            self.spare[slot // NUM_TIERS].push_hot(holding)

    def _rank(self, holding: Holding, slot: int) -> None:
        if holding.node.retention is None or not self.retained[slot].put(holding):
            self.orders[slot].insert(holding)

    def _rank_again(self, holding: Holding, slot: int) -> None:
        self.leave(holding, slot)
        self._rank(holding, slot)

    def _rank_twin_again(self, node: Node, device_slot: int) -> None:
        """Of a page that the device was about to let go of, and has kept: see keep_spare()."""
        twin = node.held[device_slot + HOST]
        queue = None if twin is None else twin.queue
        if twin is not None and queue not in (None, self.spare[device_slot // NUM_TIERS]):
            self._rank_again(twin, device_slot + HOST)

    def leave(self, holding: Holding, slot: int) -> None:
        """The holding is going, or is to stand elsewhere. Harmless if it stands nowhere."""
        queue = holding.queue
        if queue is None:
            return
        if queue is self.spare[slot // NUM_TIERS]:
            queue.remove(holding)
        elif holding in self.retained[slot].sizes:
            self.retained[slot].remove(holding)
        else:
            self.orders[slot].remove(holding)

    def split(self, slot: int, lower: Holding, upper: Holding) -> None:
        """`upper` was cut off `lower`: same standing, right behind it."""
        if lower.queue is self.spare[slot // NUM_TIERS]:
            lower.queue.insert_after(lower, upper)
        elif lower in self.retained[slot].sizes:
            self.retained[slot].split(lower, upper)
        elif lower.queue is not None:
            self.orders[slot].split(lower, upper)

    def touch(self, tail: Node, use: int) -> None:
        """All of the path to `tail` was used, for the `use`-th time that one was: children first,
        so that parents rank as hotter."""
        orders, device_slots, node = self.orders, self._device_slots, tail
        while (parent := node.parent) is not None:
            node.last_use = use
            held = node.held
            for slot in device_slots:
                holding = held[slot]
                if holding is not None and holding.state is READY:
                    if node.retention is None:
                        orders[slot].touch(holding)
                    else:
                        self._rank_again(holding, slot)
                        self._rank_twin_again(node, slot)
                    continue
                holding = held[slot + HOST]
                if holding is not None and holding.state is READY:
                    if node.retention is None:
                        orders[slot + HOST].touch(holding)
                    else:
                        self._rank_again(holding, slot + HOST)
            node = parent

    def unpark(self, holding: Holding, slot: int) -> None:
        """A READY holding that may have been parked can go again."""
        if holding.queue is not None:
            return
        if slot % NUM_TIERS == HOST and on_device(holding.node, slot):
            self.spare[slot // NUM_TIERS].push_hot(holding)
        elif holding.node.retention is None or not self.retained[slot].put(holding, hot=False):
            self.orders[slot].unpark(holding)

    def victim(self, slot: int, evictable: Evictable) -> Holding | None:
        """What goes next (it stays in the order), or None. Parks those in front of it."""
        retained, order = self.retained[slot], self.orders[slot]
        if not retained.sizes:
            return order.victim(evictable)
        first = retained.before(evictable)
        if first is not None:
            return first
        return order.victim(evictable) or retained.behind(evictable)

    def coldest(self, slot: int) -> Iterator[Holding]:
        """All that stand in a slot, but for spare ones: the policy's from its cold end on, then
        those that are retained. Nothing must change while iterating."""
        return chain(self.orders[slot].coldest(), self.retained[slot])

    def keep_spare(self, node: Node, slot: int) -> None:
        """The device will let go of `node` soon: rank its host copy as if it had already."""
        holding = node.held[slot]
        if holding is not None and holding.queue is self.spare[slot // NUM_TIERS]:
            holding.queue.remove(holding)
            self._rank(holding, slot)

    def no_longer_spare(self, node: Node, device_slot: int) -> None:
        """The device copy is of no use any more: the host copy is all there is."""
        host = node.held[device_slot + HOST]
        if host is not None and host.state is READY:
            self.leave(host, device_slot + HOST)
            self._rank(host, device_slot + HOST)


def on_device(node: Node, host_slot: int) -> bool:
    """Does the device hold, readable, what `host_slot` holds?"""
    device = node.held[host_slot - HOST]
    return device is not None and device.state is READY
