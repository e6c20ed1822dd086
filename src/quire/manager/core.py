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
from quire.manager.counters import Counters
from quire.manager.events import CacheEvent, EventBuffer, EventKind
from quire.manager.operations import Operation, Operations
from quire.memory.allocator import PageAllocator
from quire.messages import Command
from quire.tree import NUM_TIERS, Freed, Node, PrefixTree, Root
from quire.types import DEVICE, HOST, PageIds, PageStatus, Tier, num_pages

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
        sizes = {DEVICE: config.device_pages, HOST: config.host_pages}
        self.allocators = [PageAllocator(sizes[tier]) for _ in components for tier in Tier]
        """By slot."""
        self.counters = Counters()
        self.events = EventBuffer(config.event_buffer)
        self.operations = Operations(config.num_ranks, [c.name for c in components], clock)
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
        gone: list[Freed] = []
        freed = 0
        if slot % NUM_TIERS == HOST:
            freed = self._evict_spare(slot, count, gone)
            self.counters.evicted_spare_pages += freed
        order, rule, tree = self.tree.standing.orders[slot], self._evictable[slot], self.tree
        before = freed
        while freed < count and (holding := order.victim(rule)) is not None:
            freed += num_pages(holding.pages)
            detached = tree.detach(holding.node, slot)
            if len(detached) > 1:  # what hung below went with it
                freed += sum(num_pages(i.pages) for i in detached[1:] if i.slot == slot)
            gone += detached
        if slot % NUM_TIERS == HOST:
            self.counters.evicted_host_pages += freed - before
        else:
            self.counters.evicted_device_pages += freed - before
        self.release(gone)
        return freed

    def _evict_spare(self, slot: int, count: int, gone: list[Freed]) -> int:
        spare, rule, freed = self.tree.standing.spare[slot // NUM_TIERS], self._evictable[slot], 0
        while freed < count and (holding := spare.hottest()) is not None:
            if rule(holding):
                freed += num_pages(holding.pages)
                gone += self.tree.detach(holding.node, slot)
            else:
                spare.remove(holding)  # parked; unlocking brings it back
        return freed

    def release(self, freed: Sequence[Freed]) -> None:
        """Pages that left the tree go back to their pools."""
        dropped = 0
        for slot, pages, node, was_ready, was_last in freed:
            self.allocators[slot].free(pages)
            if was_ready:
                dropped += num_pages(pages) if was_last else 0
                self.removed(node, slot)
        if dropped:
            self.counters.dropped_pages += dropped

    def count_faults(self, kind: str, statuses: bytes) -> None:
        """Count the pages that did not end OK, by what they ended as."""
        for status in PageStatus:
            if status and (count := statuses.count(status)):
                self.counters.faults[f"{kind}:{status.name.lower()}"] += count

    # ---- protection -----------------------------------------------------------------------------

    def protect(self, tail: Node, extra: Sequence[Guard] = ()) -> list[Guard]:
        """Keep the path to `tail` usable in every component, and what the extra guards name."""
        if tail.parent is None:
            assert isinstance(tail, Root)
            tail.users += 1
            return [(ROOT_SLOT, tail, None)]
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
            self._emit(EventKind.STORED, slot, node)

    def removed(self, node: Node, slot: int) -> None:
        """Announce that a node's pages in a tier cannot be used any more."""
        if self.events.enabled:
            self._emit(EventKind.REMOVED, slot, node)

    def written(self, node: Node) -> None:
        """Announce that the store has a node's pages."""
        if self.events.enabled:
            keys = self.tree.keys_of(node)
            for component in self.components:
                self.events.add(CacheEvent(EventKind.STORED, "store", component.name, keys))

    def _emit(self, kind: EventKind, slot: int, node: Node) -> None:
        component, tier = divmod(slot, NUM_TIERS)
        name = self.components[component].name
        keys = self.tree.keys_of(node)
        self.events.add(CacheEvent(kind, Tier(tier).name.lower(), name, keys))

    def finish(self, op: Operation) -> None:
        """Give back the locks of an operation that has ended."""
        self.unprotect(op.guards)
