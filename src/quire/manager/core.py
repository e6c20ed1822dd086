"""Core: what the parts of the manager share, and the moves of pages between owners.

Knows the tree, the allocators, the counters, the events and the outbox. Each page of each pool is
at every moment free, in the tree, in a lease or in an operation; every move between those goes
through here or through the tree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from quire.components import Component, Guard, PoolSize
from quire.config import CacheConfig
from quire.eviction import make_policy
from quire.keys import TOKEN_BYTES, PrefixKey
from quire.manager.counters import Counters
from quire.manager.events import CacheEvent, EventBuffer, EventKind
from quire.manager.operations import Operation, Operations
from quire.manager.upkeep import Upkeep
from quire.memory.allocator import PageAllocator
from quire.messages import Command
from quire.tree import (
    NUM_TIERS,
    Freed,
    Holding,
    Node,
    PrefixTree,
    Root,
    Tenant,
    may_go,
    next_spare,
    rest,
    rest_below,
    slot_of,
)
from quire.types import (
    DEVICE,
    HOST,
    PAGE_KEY_BYTES,
    READY,
    Clock,
    Owner,
    PageIds,
    PageStatus,
    Tier,
    num_pages,
)

WHOLE_SHARE = 16
"""What is on the host too leaves the device whole if it is no more than this share of it."""
EVICTED_SHARE = 512
MAX_EVICTED_PAGES = 32
"""A node is evicted from its end: this share of the pool at a time and at most so many pages, or a
quarter of the node, since cutting costs as much as the node is long."""
OWN_SHARE = 32
"""Of a tenant's quota, what goes at a time when it has reached it."""
OWNER_DIGITS = 32
MAX_STORE_USES = 1024
ROOT_SLOT = -1
"""In a Guard: not a holding but the root itself, which an empty namespace needs to stay."""


class StoreUse(NamedTuple):
    """Full pages that were written for a tenant, and that the store would not take."""

    num_written: int = 0
    num_refused: int = 0


class Core:
    def __init__(self, config: CacheConfig, components: Sequence[Component], clock: Clock) -> None:
        self.config = config
        self.components = components
        self.clock = clock
        sizes = [c.pool or PoolSize(config.device_pages, config.host_pages) for c in components]
        self.tree = PrefixTree(
            len(components),
            lambda _component, _tier: make_policy(config.eviction, clock, config.retention_decay_s),
            [c.index for c in components if c.is_point],
            clock=clock,
            max_retained=[int(size[t] * config.retained_share) for size in sizes for t in Tier],
            counts_pages=config.tenant_share < 1,
        )
        self.quotas = [max(1, int(size[t] * config.tenant_share)) for size in sizes for t in Tier]
        """By slot, pages that one tenant may have cached."""
        self.allocators = [PageAllocator(size[tier]) for size in sizes for tier in Tier]
        """By slot."""
        self._evicted_pages = [
            max(1, min(a.num_pages // EVICTED_SHARE, MAX_EVICTED_PAGES)) for a in self.allocators
        ]
        self.refused: dict[int, int] = {}
        """By slot: pages that somebody asked for in vain since the writer last looked."""
        self.taken = [0] * len(self.allocators)
        """By slot: pages reserved since the writer last looked."""
        self.upkeep = Upkeep(self.tree, components) if len(components) > 1 else None
        """Keeps what several components hold in step; one alone needs none."""
        self._bared: list[Node] = []
        """What they had beside full pages has gone since the last step."""
        self.counters = Counters()
        self.events = EventBuffer(config.event_buffer)
        self.operations = Operations(config.num_ranks, [c.name for c in components], clock)
        self.outbox: list[Command] = []
        self.store_epoch = 0
        """Number of the store attached, counting attachments and clearings; 0: none attached."""
        self._last_epoch = 0
        self._may_go = [partial(may_go, slot=slot) for slot in range(len(self.allocators))]
        self.has_quotas = config.tenant_share < 1
        self.store_uses: dict[str, StoreUse] = {}
        """By tenant, those written for last at the end, where quotas are kept."""

    # ---- pages ----------------------------------------------------------------------------------

    def tenant(self, key: PrefixKey) -> Tenant | None:
        """Whose quota is to be kept; None: nobody has one."""
        return self.tree.tenant(key) if self.has_quotas else None

    def owner(self, node: Node) -> Owner | None:
        """Who has what is written of a node, where quotas are kept."""
        if not self.has_quotas:
            return None
        name = self.tree.root_of(node).tenant.name
        digest = hashlib.sha256(name.encode()).hexdigest()[:OWNER_DIGITS]
        return Owner(digest, self.config.tenant_share) if name else None

    def account(self, node: Node, *, written: int, refused: int) -> None:
        """The store took so many full pages of a node, and would not take others."""
        name = self.tree.root_of(node).tenant.name
        before = self.store_uses.pop(name, StoreUse())
        self.store_uses[name] = StoreUse(before.num_written + written, before.num_refused + refused)
        if len(self.store_uses) > MAX_STORE_USES:
            del self.store_uses[next(iter(self.store_uses))]

    def room(self, slot: int) -> int:
        """Pages that could be had in a slot now: the free ones, and all that may be evicted."""
        stays = self.tree.stays
        stays.catch_up()
        return self.allocators[slot].num_free + stays.movable[slot]

    def _keep_quota(self, tenant: Tenant, slot: int, count: int) -> None:
        """Somebody is to have so many pages more: a tenant that has its quota makes room for them
        among its own, as far as nobody uses these."""
        over = tenant.num_held[slot] + count - self.quotas[slot]
        if over > 0:
            self._evict_own(tenant, slot, over)

    def _evict_own(self, tenant: Tenant, slot: int, count: int) -> None:
        """What one tenant used longest ago goes; some more than asked for, since looking for it
        costs as much as the tenant has."""
        count = max(count, self.quotas[slot] // OWN_SHARE)
        gone: list[Freed] = []
        freed, rule = 0, self._may_go[slot]
        self.tree.stays.catch_up()
        while freed < count:
            ends = [holding for holding in _held_by(tenant, slot) if rule(holding)]
            if not ends:
                break
            for holding in sorted(ends, key=partial(_own_order, slot=slot, now=self.clock())):
                if freed < count and holding.node.held[slot] is holding and rule(holding):
                    freed += self._detach_end(holding, slot, count - freed, gone)
            self.tree.stays.catch_up()
        self.counters.evicted_own_pages += freed
        if slot % NUM_TIERS == HOST:
            self.counters.evicted_host_pages += freed
        else:
            self.counters.evicted_device_pages += freed
        if self.upkeep is not None:
            self._discard(self.upkeep.after(gone))

    def reserve(
        self, slot: int, count: int, tenant: Tenant | None = None, beside: int = 0
    ) -> PageIds | None:
        """Allocate, evicting the shortfall if need be. None: nothing was changed. `tenant`: for
        whom, if anybody; `beside`: pages that it has and the tree does not know yet."""
        allocator = self.allocators[slot]
        if tenant is not None and tenant.name and count <= self.room(slot):
            self._keep_quota(tenant, slot, count + beside)
        pages = allocator.allocate(count)
        if pages is None:
            if count > self.room(slot):
                self.refused[slot] = count
                return None
            self.evict(slot, count - allocator.num_free)
            pages = allocator.allocate(count)
            assert pages is not None, "eviction freed less than it said it could"
        self.taken[slot] += count
        return pages

    def reserve_all(
        self, sizes: Sequence[tuple[int, int]], tenant: Tenant | None, beside: int = 0
    ) -> list[PageIds] | None:
        """So many pages in each of these slots, or None and nothing was changed. For whom, and
        `beside` of full pages: as above."""
        for slot, count in sizes:
            if count > self.room(slot):
                self.refused[slot] = count
                return None
        taken = [
            self.reserve(slot, count, tenant, 0 if slot >= NUM_TIERS else beside)
            for slot, count in sizes
        ]
        return [pages for pages in taken if pages is not None]

    def evict(self, slot: int, count: int) -> int:
        """Free at least `count` pages of the slot if that many may go. Returns how many went.

        Host: copies of what the device has too go first (see tree/spares.py), then leaves that
        only the host has, in policy order.
        """
        gone: list[Freed] = []
        standing, rule = self.tree.standing, self._may_go[slot]
        spares = standing.spare[slot // NUM_TIERS] if slot % NUM_TIERS == HOST else None
        freed = num_spare = 0
        while freed < count:
            self.tree.stays.catch_up()
            spare = None if spares is None else next_spare(spares, slot, standing.retained[slot])
            victim = standing.victim(slot, rule) if spare is None else spare.holding
            if victim is None:
                break
            size = self._detach_end(victim, slot, count - freed, gone)
            freed += size
            if spare is not None and spare.instead_of is None:
                num_spare += size
            elif spare is not None and spare.instead_of is not None:
                spare.instead_of.given_up += size
        if spares is None:
            self.counters.evicted_device_pages += freed
        else:
            self.counters.evicted_spare_pages += num_spare
            self.counters.evicted_host_pages += freed - num_spare
        if self.upkeep is not None:
            self._discard(self.upkeep.after(gone))
        return freed

    def _detach_end(self, holding: Holding, slot: int, wanted: int, gone: list[Freed]) -> int:
        """Take so many pages, or a few more, off the end of a holding. Returns how many pages of
        the slot went. With several components all of it goes: its end alone is of no use."""
        node = holding.node
        size = num_pages(holding.pages)
        least = self._evicted_pages[slot]
        keep = size - max(wanted, least, size // 4)
        if keep >= least and self.upkeep is None and not self._goes_whole(node, slot, size):
            self.tree.split(node, keep)
        detached = self.tree.detach(node, slot)
        gone += detached
        self._give_back(detached)
        if slot == DEVICE and len(detached) > 1:  # the host had no room for a copy of it
            lost = sum(num_pages(item.pages) for item in detached if item.slot == HOST)
            self.counters.evicted_host_pages += lost
        if self.upkeep is None:
            rest_below(self.tree, node)
        return sum(num_pages(item.pages) for item in detached if item.slot == slot)

    def _goes_whole(self, node: Node, slot: int, size: int) -> bool:
        """Is it a small part of the device, and on the host too? Then it goes as a whole: nothing
        is lost, and nothing need be cut, and joined again when it comes back."""
        host = node.held[HOST] if slot == DEVICE else None
        small = size * WHOLE_SHARE <= self.allocators[slot].num_pages
        return small and host is not None and host.state is READY

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
            self._bared += [item.node for item in freed if item.slot >= NUM_TIERS]

    def settle(self) -> None:
        """At the end of a step, when nobody is in the midst of a path: nodes that have full pages
        alone now may be like those around them."""
        bared, self._bared = self._bared, []
        for node in bared:
            rest(self.tree, node)

    def _give_back(self, freed: Sequence[Freed]) -> None:
        dropped = 0
        for item in freed:
            self.allocators[item.slot].free(item.pages)
            if item.was_ready:
                dropped += num_pages(item.pages) if item.was_last else 0
                self.announce_removed(item.node, item.slot)
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
        guards = self.components[0].protection(tail)
        if extra or self.upkeep is not None:
            # Full pages last, here and in `hold`: they may go with their last lock, and everything
            # else of their node must be free to go by then.
            first = list(extra)
            for component in self.components[1:]:
                first += component.protection(tail)
                if device_tail is not tail:
                    first += component.protection(device_tail)
            guards = first + guards
        return self.lock(guards)

    def protect_host(self, tail: Node) -> list[Guard]:
        """Keep the host's copies of the path to `tail`, all of which it has."""
        if tail.parent is None:
            return self.protect(tail, tail)
        guards: list[Guard] = []
        for component in self.components[1:]:
            slot = slot_of(component.index, HOST)
            guards += [(slot, node, node.parent) for node in component.needed(tail)]
        guards.append((HOST, tail, None))
        return self.lock(guards)

    def hold(self, node: Node, slot: int) -> list[Guard]:
        """For an operation: keep what `node` has READY in this slot, and the path to it."""
        own: Guard = (slot, node, node.parent)
        if slot == DEVICE or (slot == HOST and self.tree.is_whole(node, slot)):
            self.tree.lock(node, node.parent, slot)
            return [own]
        return self.lock([own, *self.components[0].protection(node)])

    def lock(self, guards: list[Guard]) -> list[Guard]:
        for slot, end, stop in guards:
            self.tree.lock(end, stop, slot)
        return guards

    def move_down(self, guards: list[Guard], tail: Node) -> bool:
        """Make `tail` the end of what these guards protect, if that is all they do: they lock one
        node on the device and it hangs right below, with nothing of its own but pages that nobody
        else has seen. False: nothing was changed."""
        if len(guards) > 1 or self.upkeep is not None:
            return False
        slot, end, stop = guards[0]
        if slot != DEVICE or tail.parent is not end or stop is not end.parent:
            return False
        self.tree.move_lock_down(tail, slot)
        guards[0] = (slot, tail, end)
        return True

    def unprotect(self, guards: list[Guard]) -> None:
        """Undo what was locked; the list is emptied, so that it cannot be undone twice."""
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

    def next_epoch(self) -> None:
        self._last_epoch += 1
        self.store_epoch = self._last_epoch

    def announce_stored(self, node: Node, slot: int, first: int = 0) -> None:
        """A node's pages, from page `first` of the prefix on, are READY in a tier."""
        if self.events.enabled:
            self._announce(EventKind.STORED, slot, node, max(0, first - node.start))

    def announce_removed(self, node: Node, slot: int) -> None:
        """A node's pages in a tier cannot be used any more."""
        if self.events.enabled:
            self._announce(EventKind.REMOVED, slot, node, 0)

    def announce_written(self, node: Node, component: Component) -> None:
        """The store has a node's pages of a component."""
        if self.events.enabled:
            self.events.add(self._event(EventKind.STORED, "store", component, node, 0))

    def _announce(self, kind: EventKind, slot: int, node: Node, skip: int) -> None:
        index, tier = divmod(slot, NUM_TIERS)
        name = Tier(tier).name.lower()
        self.events.add(self._event(kind, name, self.components[index], node, skip))

    def _event(
        self, kind: EventKind, tier: str, component: Component, node: Node, skip: int
    ) -> CacheEvent:
        """Of a node's pages without the first `skip`."""
        keys = self.keys_of(node, component)
        parent = tokens = b""
        if kind is EventKind.STORED and self.config.event_tokens and not component.is_point:
            step = self.config.page_size * TOKEN_BYTES
            tokens = bytes(node.tokens[skip * step : node.num_pages * step])
            if skip:
                parent = keys[(skip - 1) * PAGE_KEY_BYTES : skip * PAGE_KEY_BYTES]
            elif node.parent is not None and node.parent.parent is not None:
                parent = self.tree.last_key_of(node.parent)
        return CacheEvent(kind, tier, component.name, keys[skip * PAGE_KEY_BYTES :], parent, tokens)

    def present(self) -> list[CacheEvent]:
        """What device and host hold now, as if it had just appeared, parents first."""
        return [
            self._event(EventKind.STORED, tier.name.lower(), component, node, 0)
            for node in self.tree.nodes()
            for component in self.components
            for tier in Tier
            if (held := node.held[slot_of(component.index, tier)]) is not None
            and held.state is READY
        ]

    def keys_of(self, node: Node, component: Component) -> bytes:
        """Keys under which a node's pages of a component are known outside."""
        return self.tree.last_key_of(node) if component.is_point else self.tree.keys_of(node)

    def finish(self, op: Operation) -> None:
        """Give back the locks of an operation that has ended."""
        if self.upkeep is None:
            self.unprotect(op.guards)
        else:
            nodes = dict.fromkeys(end for _, end, _ in op.guards)
            self.unprotect(op.guards)
            self.tidy(nodes)


def _own_order(holding: Holding, slot: int, now: float) -> tuple[int, float]:
    """What goes first among a tenant's own: as in the tier, what is retained last."""
    node, level = holding.node, 0
    if node.retention is not None and node.retention.is_held_in(slot % NUM_TIERS, now):
        level = node.retention.level
    return level, node.last_use


def _held_by(tenant: Tenant, slot: int) -> Iterator[Holding]:
    nodes: list[Node] = list(tenant.roots)
    while nodes:
        for child in (nodes.pop().children or {}).values():
            nodes.append(child)
            holding = child.held[slot]
            if holding is not None and holding.state is READY:
                yield holding
