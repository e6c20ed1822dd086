"""Core: what the parts of the manager share, and the moves of pages between owners.

Knows the tree, the allocators, the counters, the events and the outbox. Each page of each pool is
at every moment free, in the tree, in a lease or in an operation; every move between those goes
through here or through the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.components import Component, Guard, PoolSize
from quire.config import CacheConfig
from quire.eviction import make_policy
from quire.manager.counters import Counters
from quire.manager.events import CacheEvent, EventBuffer, EventKind
from quire.manager.operations import Operation, Operations
from quire.manager.upkeep import Upkeep
from quire.memory.allocator import PageAllocator
from quire.messages import Command
from quire.tree import NUM_TIERS, Freed, Node, PrefixTree, Root, slot_of
from quire.types import (
    DEVICE,
    HOST,
    READY,
    PageIds,
    PageStatus,
    Tier,
    num_pages,
)

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
            [c.index for c in components if c.is_point],
        )
        sizes = [c.pool or PoolSize(config.device_pages, config.host_pages) for c in components]
        self.allocators = [PageAllocator(size[tier]) for size in sizes for tier in Tier]
        """By slot."""
        self.upkeep = Upkeep(self.tree, components) if len(components) > 1 else None
        """Keeps what several components hold in step; one alone needs none."""
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

    def room(self, slot: int) -> int:
        """Free pages and all that could be evicted now. (Placeholder: walks the tree.)"""
        component, tier = divmod(slot, NUM_TIERS)
        total = self.allocators[slot].num_free

        def visit(node: Node) -> tuple[bool, int]:
            below = [visit(child) for child in (node.children or {}).values()]
            count, clear = sum(n for _, n in below), all(ok for ok, _ in below)
            holding = node.held[slot]
            if holding is None:
                gone = tier == HOST and node.held[slot - tier] is not None
                return (clear and not gone if component == 0 and tier == HOST else clear), count
            may = holding.state is READY and not holding.locks
            if component == 0 and tier == DEVICE:
                may = may and clear
            elif component == 0:
                device = node.held[DEVICE]
                spare = device is not None and device.state is READY
                may = may and (spare or clear)
                return may and clear and device is None, count + may * num_pages(holding.pages)
            return may, count + may * num_pages(holding.pages)

        return total + sum(visit(root)[1] for root in self.tree.roots.values())

    def reserve_all(self, sizes: Sequence[tuple[int, int]]) -> list[PageIds] | None:
        """`reserve` in several slots, all or nothing. (Placeholder.)"""
        short = [(s, n) for s, n in sizes if self.allocators[s].num_free < n]
        if any(self.room(slot) < count for slot, count in short):
            return None
        taken = [self.reserve(slot, count) for slot, count in sizes]
        if all(pages is not None for pages in taken):
            return [pages for pages in taken if pages is not None]
        for (slot, _), pages in zip(sizes, taken, strict=True):
            self.allocators[slot].free(pages or PageIds(b""))
        return None

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
        self._give_back(gone)
        if self.upkeep is not None:
            self._discard(self.upkeep.after(gone))
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
        """Pages that left the tree go back to their pools, and with them what they made useless."""
        self._give_back(freed)
        if self.upkeep is not None:
            self._discard(self.upkeep.after(freed))

    def tidy(self, nodes: Iterable[Node]) -> None:
        """These are used less than before: let go of what nobody can use any more."""
        if self.upkeep is not None:
            for node in nodes:
                self._discard(self.upkeep.tidy(node))

    def drop(self, node: Node, component: int) -> None:
        """Give up what a node holds of a component, in every tier where nobody uses it."""
        for slot in (slot_of(component, DEVICE), slot_of(component, HOST)):
            holding = node.held[slot]
            if holding is not None and holding.state is READY and not holding.locks:
                self._give_back(self.tree.detach(node, slot))

    def _discard(self, freed: Sequence[Freed]) -> None:
        """Pages that were of no use any more."""
        if freed:
            self.counters.useless_pages += sum(num_pages(item.pages) for item in freed)
            self._give_back(freed)

    def _give_back(self, freed: Sequence[Freed]) -> None:
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

    def protect(self, tail: Node, device_tail: Node, extra: Sequence[Guard] = ()) -> list[Guard]:
        """Keep the path to `tail` usable in every component, and that to `device_tail`, which
        lies on it, in those that need other pages there; and what the extra guards name."""
        if tail.parent is None:
            assert isinstance(tail, Root)
            tail.users += 1
            return [(ROOT_SLOT, tail, None)]
        # Full pages last, here and in `hold`: they may go with their last lock, and everything else
        # of their node must be free to go by then.
        guards = list(extra)
        if self.upkeep is not None:
            for component in self.components[1:]:
                guards += component.protection(tail)
                if device_tail is not tail:
                    guards += component.protection(device_tail)
        guards += self.components[0].protection(tail)
        for slot, end, stop in guards:
            self.tree.lock(end, stop, slot)
        return guards

    def protect_host(self, tail: Node) -> list[Guard]:
        """Keep the host's copies of the path to `tail`, all of which it has."""
        if tail.parent is None:
            return self.protect(tail, tail)
        guards: list[Guard] = []
        for component in self.components[1:]:
            slot = slot_of(component.index, HOST)
            guards += [(slot, node, node.parent) for node in component.needed(tail)]
        guards.append((HOST, tail, None))
        for slot, end, stop in guards:
            self.tree.lock(end, stop, slot)
        return guards

    def hold(self, node: Node, slot: int) -> list[Guard]:
        """For an operation: keep the path to `node`, and what it has READY in this slot."""
        guards = self.components[0].protection(node)
        if slot != DEVICE:  # else it is among them
            guards.insert(0, (slot, node, node.parent))
        for guarded, end, stop in guards:
            self.tree.lock(end, stop, guarded)
        return guards

    def unprotect(self, guards: list[Guard]) -> None:
        """Undo `protect` or `hold`; the list is emptied, so that it cannot be undone twice."""
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

    def written(self, node: Node, component: Component) -> None:
        """Announce that the store has a node's pages of a component."""
        if self.events.enabled:
            self.events.add(
                CacheEvent(EventKind.STORED, "store", component.name, self.keys_of(node, component))
            )

    def _emit(self, kind: EventKind, slot: int, node: Node) -> None:
        index, tier = divmod(slot, NUM_TIERS)
        component = self.components[index]
        keys = self.keys_of(node, component)
        self.events.add(CacheEvent(kind, Tier(tier).name.lower(), component.name, keys))

    def keys_of(self, node: Node, component: Component) -> bytes:
        """Keys under which a node's pages of a component are known outside."""
        return self.tree.last_key_of(node) if component.is_point else self.tree.keys_of(node)

    def finish(self, op: Operation) -> None:
        """Give back the locks of an operation that has ended."""
        nodes = dict.fromkeys(end for _, end, _ in op.guards) if self.upkeep is not None else ()
        self.unprotect(op.guards)
        self.tidy(nodes)
