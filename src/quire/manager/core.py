"""Core: what the parts of the manager share, and the moves of pages between owners.

Knows the tree, the allocators, the counters, the events and the outbox. Each page of each pool is
at every moment free, in the tree, in a lease or in an operation; every move between those goes
through here or through the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.components import Component, Guard
from quire.config import CacheConfig
from quire.eviction import make_policy
from quire.manager.counters import Count, Counters
from quire.manager.events import CacheEvent, EventBuffer, EventKind
from quire.manager.operations import Operation, Operations
from quire.memory.allocator import PageAllocator
from quire.messages import Command
from quire.tree import NUM_TIERS, Freed, Node, PrefixTree, Root, slot_of
from quire.types import PageIds, PageStatus, Tier, num_pages

Clock = Callable[[], float]
ROOT_SLOT = -1
"""In a Guard: not a holding but the root itself, which an empty namespace needs to stay."""


class Core:
    def __init__(self, config: CacheConfig, components: Sequence[Component], clock: Clock) -> None:
        self.config = config
        self.components = components
        self.clock = clock
        self.tree = PrefixTree(
            len(components),
            lambda _component, _tier: make_policy(config.eviction, clock, config.retention_decay_s),
        )
        sizes = {Tier.DEVICE: config.device_pages, Tier.HOST: config.host_pages}
        self.allocators = [PageAllocator(sizes[tier]) for _ in components for tier in Tier]
        """By slot."""
        self.counters = Counters()
        self.events = EventBuffer(config.event_buffer)
        self.operations = Operations(config.num_ranks, [c.name for c in components])
        self.outbox: list[Command] = []
        self.store_epoch = 0
        """Number of the store attached, counting attachments and clearings; 0: none attached."""
        self._last_epoch = 0
        self._evictable = [c.evictable(tier) for c in components for tier in Tier]

    # ---- pages ----------------------------------------------------------------------------------

    def reserve(self, slot: int, count: int) -> PageIds | None:
        """Allocate, evicting the shortfall if need be. None: nothing was allocated."""
        allocator = self.allocators[slot]
        pages = allocator.allocate(count)
        if pages is None:
            if count > allocator.num_pages:
                return None  # hopeless: do not empty the cache for it
            self.evict(slot, count - allocator.num_free)
            pages = allocator.allocate(count)
        return pages

    def evict(self, slot: int, count: int) -> int:
        """Free at least `count` pages of the slot if that many may go. Returns how many went.

        Host: copies of what the device has too go first, most recently used first (the device
        will keep those longest); then leaves that only the host has, in policy order.
        """
        freed = 0
        gone: list[Freed] = []
        component, tier = divmod(slot, NUM_TIERS)
        spare = self.tree.standing.spare[component] if tier == Tier.HOST else None
        while freed < count and spare is not None and (holding := spare.hottest()) is not None:
            if self._evictable[slot](holding):
                freed += num_pages(holding.pages)
                self.counters.add(Count.EVICTED_SPARE, num_pages(holding.pages))
                gone += self.tree.detach(holding.node, slot)
            else:
                spare.remove(holding)  # parked; unlocking brings it back
        order, rule = self.tree.standing.orders[slot], self._evictable[slot]
        name = Count.EVICTED_HOST if tier == Tier.HOST else Count.EVICTED_DEVICE
        while freed < count and (holding := order.victim(rule)) is not None:
            self.counters.add(name, num_pages(holding.pages))
            detached = self.tree.detach(holding.node, slot)
            gone += detached
            freed += sum(num_pages(i.pages) for i in detached if slot_of(*i[:2]) == slot)
        self.release(gone)
        return freed

    def release(self, freed: Sequence[Freed]) -> None:
        """Pages that left the tree go back to their pools."""
        for gone in freed:
            self.allocators[slot_of(gone.component, gone.tier)].free(gone.pages)
            if not gone.was_ready:
                continue
            if gone.was_last:
                self.counters.add(Count.DROPPED, num_pages(gone.pages))
            self.removed(gone.node, slot_of(gone.component, gone.tier))

    def count_faults(self, kind: str, statuses: bytes) -> None:
        """Count the pages that did not end OK, by what they ended as."""
        for status in PageStatus:
            if status and (count := statuses.count(status)):
                self.counters.status(kind, status.name.lower(), count)

    # ---- protection -----------------------------------------------------------------------------

    def protect(self, tail: Node, extra: Sequence[Guard] = ()) -> list[Guard]:
        """Keep the path to `tail` usable in every component, and what the extra guards name."""
        if isinstance(tail, Root):
            tail.users += 1
            return [Guard(ROOT_SLOT, tail, None)]
        guards: list[Guard] = []
        for component in self.components:
            guards += component.protection(tail)
        guards += extra
        for slot, end, stop in guards:
            self.tree.lock(end, stop, slot)
        return guards

    def unprotect(self, guards: list[Guard]) -> None:
        """Undo `protect`; the list is emptied, so that it cannot be undone twice."""
        for slot, end, stop in guards:
            if slot == ROOT_SLOT:
                assert isinstance(end, Root)
                end.users -= 1
                self.tree.drop_root_if_unused(end)
            elif freed := self.tree.unlock(end, stop, slot):
                self.release(freed)
        guards.clear()

    @property
    def healthy(self) -> bool:
        """Are all ranks alive? Without one of them no new operation could ever end."""
        return not self.operations.lost_ranks

    # ---- keys, store, events --------------------------------------------------------------------

    @property
    def keyed(self) -> bool:
        """Does anybody need page keys at the moment?"""
        return self.store_epoch > 0 or self.events.enabled

    def next_epoch(self) -> None:
        self._last_epoch += 1
        self.store_epoch = self._last_epoch

    def stored(self, node: Node, slot: int) -> None:
        """Announce that a node's pages are READY in a tier."""
        if self.events.enabled:
            component, tier = divmod(slot, len(Tier))
            self._emit(EventKind.STORED, Tier(tier).name.lower(), component, node)

    def removed(self, node: Node, slot: int) -> None:
        """Announce that a node's pages in a tier cannot be used any more."""
        if self.events.enabled:
            component, tier = divmod(slot, len(Tier))
            self._emit(EventKind.REMOVED, Tier(tier).name.lower(), component, node)

    def written(self, node: Node) -> None:
        """Announce that the store has a node's pages."""
        if self.events.enabled:
            for component in self.components:
                self._emit(EventKind.STORED, "store", component.index, node)

    def _emit(self, kind: EventKind, tier: str, component: int, node: Node) -> None:
        name = self.components[component].name
        self.events.add(CacheEvent(kind, tier, name, self.tree.keys_of(node)))

    def finish(self, op: Operation) -> None:
        """Give back the locks of an operation that has ended."""
        self.unprotect(op.guards)
