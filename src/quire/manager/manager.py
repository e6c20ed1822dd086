"""CacheManager: the leader. All decisions, no bytes.

Single-threaded and never blocking: calls change metadata and queue commands; `step` takes in what
the workers have reported and gives out what they should do next. The life of a request:

    match → acquire → prefetch ··· ready? → admit → load → extend → (compute) → commit → release

`match` only reads. Everything from `acquire` on goes through the Lease, and `release` (or leaving
its `with` block) at any point gives back all that it held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.components import Component, FullAttention, Guard, usable_pages
from quire.components.base import is_ready
from quire.config import CacheConfig
from quire.errors import ConfigError, LeaseError
from quire.eviction import GO_FIRST, Retention
from quire.keys import Namespace, PrefixKey
from quire.manager.audits import Audits
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.exports import Exports
from quire.manager.fetches import Fetches, Prefetch
from quire.manager.foreign import ForeignDevice
from quire.manager.lease import Lease, LoadState, PrefixMatch, Wish
from quire.manager.loads import Loader
from quire.manager.outline import outline
from quire.manager.states import States
from quire.manager.store_control import StoreControl
from quire.manager.writes import Writer
from quire.messages import (
    Command,
    Completion,
    Probed,
    StoreChanged,
    Transferred,
    WorkerLost,
)
from quire.tree import Node, Walk, held_pages, rest, slot_of
from quire.types import (
    DEVICE,
    DRAINING,
    HOST,
    NO_PAGES,
    NO_SLOT,
    PAGE_ID_BYTES,
    Clock,
    PageIds,
    RequestId,
    Tier,
    num_pages,
)

_LOAD_FAILED = LoadState.FAILED


class PoolUse(NamedTuple):
    """Pages of one component's pool in one tier."""

    component: str
    tier: Tier
    num_pages: int
    used_pages: int
    locked_pages: int


class CacheManager:
    def __init__(
        self,
        config: CacheConfig,
        *,
        clock: Clock,
        components: Sequence[Component] | None = None,
    ) -> None:
        self.config = config
        core = self._core = Core(config, components or [FullAttention()], clock)
        self.components = core.components
        self.counters = core.counters
        self.operations = core.operations
        """In flight, ended, and lost ranks: to be read."""
        self.events = core.events
        self.present = core.present
        self.costs = CostModel(enabled=config.prefetch.cost_model, page_size=config.page_size)
        self.store = StoreControl(core, self.costs.forget_store)
        self.leases: set[Lease] = set()
        # What only models of several components need is None for the others: it costs nothing.
        self._states = States(core) if len(core.components) > 1 else None
        self._writer = Writer(core)
        self._loader = Loader(core, self._states, self.costs, self._let_go_of_condemned)
        self._fetches = Fetches(
            core, self.costs, self._advance, self._streamed, self._let_go_of_copies
        )
        self.offers = self._fetches.offers
        """What peers bring."""
        self.meetings = self._fetches.meetings
        """What the store brings from the back while a request computes from the front."""
        self.exports = Exports(core, self._writer.demand)
        """What peers are given to read."""
        self.foreign = ForeignDevice(core, self.costs, self._advance, self._writer.used)
        """For an engine that owns its device pages."""
        self.audits = Audits(core)
        """For an engine that computes what is cached again, to compare."""
        self.outline = partial(outline, core)
        """The tree, for a person to look at: at most so many runs of pages."""
        _check_pools(core)

    # ---- the life of a request ------------------------------------------------------------------

    def match(self, key: PrefixKey) -> PrefixMatch:
        """Longest usable prefix of `key`, in pages. Changes nothing, protects nothing."""
        if key.path.namespace.page_size != self.config.page_size:
            raise ConfigError(
                f"the key has pages of {key.namespace.page_size} units, this cache of "
                f"{self.config.page_size}: build keys with the cache's page_size"
            )
        walk = self._core.tree.walk(key)
        reachable, on_device = self._usable(walk, 0)
        return PrefixMatch(key, on_device, reachable - on_device, walk, self._core.tree.changes)

    def _usable(self, walk: Walk, first: int) -> tuple[int, int]:
        """Boundaries up to which a walk from page `first` is usable at all, and on the device."""
        components, path = self._core.components, walk.nodes
        if not path:
            return first, first
        on_device = usable_pages(components, path, first, walk.num_pages, host=False)
        if on_device == walk.num_pages:
            return on_device, on_device
        return usable_pages(components, path, first, walk.num_pages, host=True), on_device

    def acquire(
        self,
        match: PrefixMatch,
        owner: RequestId,
        *,
        priority: int = 0,
        again: bool = False,
        wish: Wish | None = None,
    ) -> Lease:
        """Protect what was matched. Matches again if the tree has changed since. `again`: the
        request has looked before, so this is no further use of what it found. `wish`: what is to be
        done with its pages."""
        if match.change != self._core.tree.changes:
            match = self.match(match.key)
        tail, device_tail, table = self._ends(match)
        node = tail
        while not again and (above := node.parent) is not None:
            node.hits += 1
            if priority:
                node.priority = max(node.priority, priority)
            node = above
        self._writer.expect(match.key.last - match.num_device)
        public = None if wish is None else wish.num_stored
        self._writer.used(tail if public is None else _within(tail, public))
        guards = self._core.protect(tail, device_tail)
        lease = Lease(self, owner, match.key, priority, tail, device_tail, guards, table)
        lease.looked, lease.wish = self._core.tree.changes, wish
        lease.tenant = self._core.tenant(match.key)
        if self._states is not None:
            seen = match.walk.num_pages
            branch = seen if seen > match.num_pages else 0
            lease.state = self._states.new(branch=branch, num_prompt=match.key.last)
            self._states.enter(lease.state, device_tail)
        self.leases.add(lease)
        if not again:
            self.counters.matched_device_pages += match.num_device
            self.counters.matched_host_pages += match.num_host
        return lease

    def _ends(self, match: PrefixMatch) -> tuple[Node, Node, PageIds]:
        """Where a match ends, at all and on the device, and its device pages."""
        tree, num_device = self._core.tree, match.num_device
        end = num_device + match.num_host
        tail: Node = tree.node_at(match.walk.nodes[-1], end) if end else tree.root(match.key)
        if num_device == end:
            device_tail = tail
        else:
            device_tail = tree.node_at(tail, num_device) if num_device else tree.root(match.key)
        pages: list[PageIds] = []
        node = device_tail
        while (above := node.parent) is not None:
            holding = node.held[DEVICE]
            assert holding is not None
            pages.append(holding.pages)
            node = above
        pages.reverse()
        return tail, device_tail, PageIds(b"".join(pages))

    def prefetch(self, lease: Lease, *, fetch: bool = True, can_meet: bool = False) -> Prefetch:
        """Look in the store for what comes after the match, and fetch it if it is worth it.

        Without `fetch` only ask: `num_hit` of the result is the answer once its state is PROBED (or
        DONE, declined), and a call with `fetch` may follow. `can_meet`: the request will call
        `meetings.start` when it has its pages, and need not wait where that is the fastest.
        """
        lease.require_live()
        prefetches = self._fetches.prefetches
        if lease.prefetch is None:
            lease.prefetch = prefetches.start(lease, fetch=fetch, can_meet=can_meet)
        elif fetch:
            prefetches.fetch(lease.prefetch)
        return lease.prefetch

    def ready(self, lease: Lease) -> bool:
        """May the request be admitted, as far as its prefetch is concerned?"""
        lease.require_live()
        return lease.prefetch is None or self._fetches.prefetches.is_over(lease.prefetch)

    def admit(self, lease: Lease) -> int:
        """End the prefetch and take in what has arrived, from the store or by other requests. What
        was loaded already, and did not arrive, is on the host as before.

        Returns the usable pages, on device and host together.
        """
        lease.require_live()
        if lease.load_state is _LOAD_FAILED and not lease.private_pages:
            self.yield_device(lease)
        if lease.prefetch is not None:
            self._fetches.prefetches.settle(lease.prefetch)
        if lease.yielded:
            self._take_back(lease)
        elif not lease.private_pages and lease.looked != self._core.tree.changes:
            self._advance(lease)
        return max(lease.num_device, lease.tail.end)

    def yield_device(self, lease: Lease, *, host: bool = False) -> None:
        """Let go of the device pages of a request that has computed nothing yet: somebody else
        needs them. It keeps what the host has of its prefix, unless it is to let go of the `host`
        too, and all that is on its way to the host; `admit` looks again."""
        lease.require_live()
        if lease.private_pages:
            raise LeaseError(f"{lease.owner!r} has computed pages: they go only with its lease")
        self._loader.forget(lease)
        lease.load_state = LoadState.IDLE
        lease.yielded = True
        if lease.state is not None:
            self._hybrid.release(lease.state, lease.device_tail)
        if host:
            root = self._core.tree.root(lease.key)
            self._move(lease, root, root, NO_PAGES, self._core.protect(root, root))
        else:
            self._hold_host(lease)

    def load(self, lease: Lease) -> int:
        """Bring the host part to the device; returns the device pages gained.

        The pages count as the lease's at once, and arrive layer by layer: wait for each layer on
        the worker, or for `lease.load_state` to leave LOADING. After one that has FAILED there is
        no other before `admit`, or a new lease.
        """
        lease.require_live()
        if lease.private_pages:
            raise LeaseError(f"{lease.owner!r} has computed pages already: load before extend")
        if lease.load_state is _LOAD_FAILED:
            return 0
        return self._loader.load(lease)

    def room(self) -> int:
        """Device pages that could be had now: the free ones, and all that may be evicted."""
        return self._core.room(DEVICE)

    def extend(self, lease: Lease, count: int) -> bool:
        """Give the request `count` private device pages. False: nothing was changed."""
        lease.require_live()
        tenant = lease.tenant
        pages = self._core.reserve(DEVICE, count, tenant, tenant.num_private if tenant else 0)
        if pages is None:
            self.counters.device_allocation_failures += 1
            return False
        lease.keep(PageIds(lease.private_pages + pages))
        return True

    def stream(self, lease: Lease) -> bool:
        """The request has device pages for all of its prompt: bring into them, through the host and
        in parts, what the store has and the host had no room for. Until `lease.stream` is None
        again nothing can be computed. False: there is no more, or it is not worth it."""
        lease.require_live()
        return self._fetches.streams.start(lease)

    def begin(self, lease: Lease) -> bool:
        """Give the request a recurrent state of its own, once. False: no slot is left."""
        lease.require_live()
        return lease.state is None or self._hybrid.begin(lease.state, lease.tenant)

    def cover(self, lease: Lease, last: int) -> bool:
        """Give it window pages for all tokens before page `last`. False: nothing was changed."""
        lease.require_live()
        return lease.state is None or self._hybrid.cover(lease.state, last, lease.tenant)

    def next_stop(self, lease: Lease, first: int, last: int) -> int:
        """Where, after page `first` and at `last` at most, a chunk should end, so that the
        recurrent state can be saved there; `last` if nowhere before."""
        return last if lease.state is None else self._hybrid.next_stop(lease.state, first, last)

    def expect_branch(self, lease: Lease, page: int) -> None:
        """Another request will want to go on after page boundary `page` of this one's prompt: have
        the state kept there, if it is still to be computed."""
        if lease.state is not None and page > lease.num_device:
            lease.state.branches.add(page)

    def save_slot(self, lease: Lease) -> int:
        """Slot into which to save the working state at the page boundary that comes next;
        NO_SLOT: it is not to be saved. Followed by `saved` once it is there."""
        state = lease.state
        return NO_SLOT if state is None else self._hybrid.save_slot(state, lease.tenant)

    def saved(self, lease: Lease, page: int) -> None:
        """The slot of `save_slot` holds the state at page boundary `page`."""
        lease.require_live()
        if lease.state is not None:
            self._hybrid.saved(lease.state, page)

    @property
    def _hybrid(self) -> States:
        assert self._states is not None
        return self._states

    def commit(self, lease: Lease, key: PrefixKey) -> int:
        """Share the computed pages of `key` (the lease's key, or one extending it).

        Returns how many pages left the private part. Pages somebody else had committed first are
        freed, and the page table then names theirs. What cannot be shared yet (a load of the
        same page is in flight) stays private; commit again later.
        """
        lease.require_live()
        core, state, tail, private = self._core, lease.state, lease.device_tail, lease.private_pages
        first = len(lease.tree_pages) // PAGE_ID_BYTES
        if key.path is not lease.key.path and not key.continues(lease.key, first):
            raise LeaseError(
                f"{lease.owner!r} commits another prefix than the one its first {first}"
                f" pages are of"
            )
        lease.key = key
        if lease.loads or lease.load_state is _LOAD_FAILED:
            return 0
        last = min(key.last, first + len(private) // PAGE_ID_BYTES)
        if state is not None:
            last = self._hybrid.shareable(state, tail, key, last)
        if last <= first:
            return 0
        mine = PageIds(private[: (last - first) * PAGE_ID_BYTES])
        if lease.wish is None and core.tree.grow(tail, key, last, mine):
            self._shared(lease, mine, last - first)
            self._committed(lease, tail, first)
            return last - first
        done = core.tree.insert(tail, key, last, DEVICE, mine)
        shared = done.tail.end - first
        self._shared(lease, done.pages, shared)
        if done.duplicate:
            core.allocators[DEVICE].free(done.duplicate)
            self.counters.duplicate_pages += num_pages(done.duplicate)
        for node in done.adopted:
            self._committed(lease, node, node.start)
            self._withhold(lease, node)
        if shared:
            if state is not None:
                self._hybrid.share(state, tail, done.tail)
            end = done.tail if done.tail.end > lease.tail.end else lease.tail
            is_next = len(done.adopted) == 1 and lease.tail is tail
            if is_next and core.move_down(lease.guards, end):
                lease.end_at(end, end)
            else:
                self._repoint(lease, end, done.tail)
            if state is not None:
                self._writer.settled(self._hybrid.checkpoint(state, done.tail))
        return shared

    def release(self, lease: Lease) -> None:
        """End or abort the request, in any state: all it held comes back."""
        lease.require_live()
        self.leases.remove(lease)
        self._fetches.release(lease)
        self.foreign.release(lease)
        if lease.loads:
            self._loader.forget(lease)
        if lease.private_pages:
            self._core.allocators[DEVICE].free(lease.private_pages)
            lease.keep(NO_PAGES)
        if lease.state is not None:
            self._hybrid.release(lease.state, lease.device_tail)
            self._writer.settled(self._hybrid.at_rest(lease.device_tail))
        if lease.wish is not None:
            self._retain(lease, lease.wish)
        self._core.tree.touch(lease.tail)
        self._core.unprotect(lease.guards)
        if lease.state is not None:
            self._core.tidy((lease.tail, lease.device_tail))
        lease.end()
        if not lease.tail.named:  # else whoever still works on it will
            rest(self._core.tree, lease.tail)

    # ---- the step -------------------------------------------------------------------------------

    def step(self, completions: Iterable[Completion] = ()) -> list[Command]:
        """Take in what workers reported, and give out what they should do next."""
        core, operations = self._core, self.operations
        for report in completions:
            known = True
            match report:
                case Transferred():
                    known = operations.transferred(report)
                case Probed():
                    known = operations.probed(report)
                case StoreChanged(op, rank, error):
                    known = operations.store_changed(op, rank, error)
                case WorkerLost(rank, reason):
                    operations.lose_rank(rank, reason)
            if not known:
                self.counters.late_reports += 1
        now = core.clock()
        if operations.deadlines and operations.deadlines[0][0] <= now:
            self.counters.overdue_operations += operations.expire(now)
        self._fetches.flush()
        self._writer.flush(now)
        if self._states is not None:
            core.settle()
        commands, core.outbox = core.outbox, []
        return commands

    def next_wakeup(self, *, soon: bool = False) -> float | None:
        """Clock time at which something is due without any report from a worker; None: never. With
        `soon` that is now, if the next step has something to do."""
        if soon and (self._core.outbox or self._writer.has_work or self._fetches.has_news):
            return self._core.clock()
        first = self._core.operations.next_deadline()
        for due in (self._writer.next_due(), self._fetches.prefetches.next_timeout()):
            if due is not None and (first is None or due < first):
                first = due
        return first

    @property
    def idle(self) -> bool:
        """Nothing in flight, nothing waiting for the next step. (A retry may wait for its time.)"""
        busy = self._core.operations.running or self._core.outbox
        waiting = self._writer.has_work or self._fetches.has_work
        return not (busy or waiting)

    @property
    def waiting_writes(self) -> int:
        """Nodes that the store is to take and that are not on their way there: they wait for others
        or for their time to be tried again."""
        return self._writer.num_waiting

    def pools(self) -> list[PoolUse]:
        """What is used of every pool, and what of it cannot be evicted."""
        core = self._core
        pools = []
        for component in core.components:
            for tier in Tier:
                allocator = core.allocators[slot := slot_of(component.index, tier)]
                used, locked = (
                    allocator.num_pages - n for n in (allocator.num_free, core.room(slot))
                )
                pools.append(PoolUse(component.name, tier, allocator.num_pages, used, locked))
        return pools

    def pages_of(self, namespace: Namespace) -> tuple[int, int]:
        """Full pages that prefixes of a namespace have on the device and on the host. Costs as much
        as they are."""
        counts, root = [0, 0], self._core.tree.roots.get(namespace.digest)
        nodes: list[Node] = [] if root is None else [root]
        while nodes:
            node = nodes.pop()
            nodes.extend((node.children or {}).values())
            for slot in (DEVICE, HOST):
                if node.held[slot] is not None:
                    counts[slot] += num_pages(held_pages(node, slot))
        return counts[0], counts[1]

    # ---- administration -------------------------------------------------------------------------

    def flush(self, tier: int, component: str | None = None) -> int:
        """Evict from a tier everything that nobody uses and without which nothing in the other
        tier would become useless; or all that nobody uses of one component, whatever needs it
        there. Returns the pages freed."""
        core, stays = self._core, self._core.tree.stays
        chosen = [c for c in core.components if component in (None, c.name)]
        if not chosen:
            names = ", ".join(c.name for c in core.components)
            raise ConfigError(f"there is no component {component!r} here: there are {names}")
        slots = [slot_of(c.index, tier) for c in chosen]
        if component is not None:
            for node, owed in [debt for debt in stays.owing if debt[1] in slots]:
                stays.forgive(node, owed)
        return sum(core.evict(slot, core.room(slot)) for slot in slots)

    def check_invariants(self) -> None:
        """Raise InvariantError unless all bookkeeping is consistent. Cost grows with the cache."""
        for _ in self.checking():
            pass

    def checking(self) -> Iterator[None]:
        """The same in small pieces: go on with `next` for as long as `activity` stays as it is."""
        from quire.manager.invariants import checks

        return checks(self._core, self.leases, self._fetches, self.foreign, self.audits)

    @property
    def activity(self) -> tuple[int, ...]:
        """Changes with everything that happens in the cache."""
        core = self._core
        return core.tree.changes, core.tree.uses, core.operations.num_started, len(self.leases)

    # ---- inside ---------------------------------------------------------------------------------

    def _advance(self, lease: Lease) -> None:
        """Extend a lease to what is now usable after its tail."""
        if lease.yielded:
            self._hold_host(lease)
        if lease.yielded or lease.load_state is _LOAD_FAILED:  # `admit` looks again
            return
        first = lease.tail.end
        walk = self._core.tree.walk(lease.key, lease.tail)
        reachable, _ = self._usable(walk, first)
        if reachable > first:
            tail = self._core.tree.node_at(walk.nodes[-1], reachable)
            self._repoint(lease, tail, lease.device_tail)

    def _streamed(self, lease: Lease, tail: Node) -> None:
        """Its device part has come, by a stream, to end there."""
        if tail.end > lease.tail.end:
            lease.end_at(tail, lease.device_tail)
        self._loader.enter(lease, tail)

    def _let_go_of_copies(self) -> None:
        """What was protected on the host while it was loaded need not be any more."""
        for lease in sorted(self.leases, key=lambda lease: lease.owner):
            # One that has FAILED names pages that go with its hold, until it is seen to.
            is_failed = lease.load_state is _LOAD_FAILED
            if not lease.yielded and not lease.loads and not is_failed:
                self._repoint(lease, lease.tail, lease.device_tail)

    def _let_go_of_condemned(self) -> None:
        """Pages do not arrive on the device. Those that saw them coming protect them, and count on
        the host's copies alone: they let go, since one of them may need the room to compute, and
        nobody else could give it. Their paths end where the host has no copy."""
        tree, components = self._core.tree, self._core.components
        for lease in sorted(self.leases, key=lambda lease: lease.owner):  # a run can be repeated
            if lease.yielded or lease.load_state is _LOAD_FAILED or not self._is_condemned(lease):
                continue
            first, nodes = lease.device_tail.end, [*tree.path(lease.tail, lease.device_tail)]
            end = usable_pages(components, nodes[::-1], first, lease.tail.end, host=True)
            tail = tree.node_at(lease.tail, end) if end > first else lease.device_tail
            self._repoint(lease, tail, lease.device_tail)

    def _is_condemned(self, lease: Lease) -> bool:
        """Is anything on its path?"""
        slots = [slot_of(component.index, DEVICE) for component in self._core.components]
        held = (node.held[slot] for node in self._core.tree.path(lease.tail) for slot in slots)
        return any(holding is not None and holding.state is DRAINING for holding in held)

    def _hold_host(self, lease: Lease) -> None:
        """The lease protects of its prefix what the host has, to a point, and nothing else."""
        core = self._core
        tail: Node = core.tree.root(lease.key)
        slots = [slot_of(c.index, HOST) for c in core.components]
        walk = core.tree.walk(lease.key)
        for node in walk.nodes:
            # The last may go another way before it ends.
            if node.end > walk.num_pages or not is_ready(node, HOST, host=False):
                break
            others = zip(core.components[1:], slots[1:], strict=True)
            if all(is_ready(n, s, host=False) for c, s in others for n in c.needed(node)):
                tail = node
        self._move(lease, tail, core.tree.root(lease.key), NO_PAGES, core.protect_host(tail))

    def _take_back(self, lease: Lease) -> None:
        """A lease that had yielded takes what there is now."""
        lease.yielded = False
        tail, device_tail, table = self._ends(self.match(lease.key))
        self._move(lease, tail, device_tail, table, self._core.protect(tail, device_tail))

    def _move(
        self, lease: Lease, tail: Node, device_tail: Node, table: PageIds, guards: list[Guard]
    ) -> None:
        """It has its new hold before it lets go of the old one."""
        before, old = (lease.tail, lease.device_tail), lease.guards
        lease.end_at(tail, device_tail)
        lease.tree_pages, lease.guards = table, guards
        if lease.state is not None:
            self._hybrid.enter(lease.state, device_tail)
        self._core.unprotect(old)
        self._core.tidy(before)

    def _repoint(self, lease: Lease, tail: Node, device_tail: Node) -> None:
        """Move the ends of what the lease protects; never lets go before it has the new hold."""
        before = lease.tail
        lease.end_at(tail, device_tail)
        old, lease.guards = lease.guards, self._core.protect(tail, device_tail)
        self._core.unprotect(old)
        if lease.state is not None:
            self._core.tidy((before, device_tail))

    def _retain(self, lease: Lease, wish: Wish) -> None:
        """Its path is about to be touched: what stands there is ranked by this. A page is of no use
        without those before it: they are kept for as long, and as well."""
        tree, now = self._core.tree, self._core.clock()
        most = max(each.max_pages for each in tree.standing.retained[: HOST + 1])
        public = wish.num_stored
        behind = Retention()
        for first, last, each in wish.ranges(lease.tail.end):
            asked = Retention.of(each.level, now + each.retain_s, each.tiers).joined(behind, now)
            behind = asked if asked.level > 0 else behind
            end = min(last, most) if asked.level > 0 else last  # of more than may be, the head
            if not asked.level or end <= first:
                continue
            above = tree.node_at(lease.tail, first) if first else None
            for node in tree.path(tree.node_at(lease.tail, end), above):
                before = node.retention
                if asked.level == GO_FIRST and (node.hits or (before and before.is_held(now))):
                    continue  # others want it
                node.retention = asked if before is None else asked.joined(before, now)
            stored = end if public is None else min(end, public)
            if asked.level > 0 and stored > first:
                self._writer.keep(tree.node_at(lease.tail, stored), asked.until_s)

    def _withhold(self, lease: Lease, node: Node) -> None:
        """It was computed: what the store may not have of it becomes a node of its own."""
        public = None if lease.wish is None else lease.wish.num_stored
        if public is not None and node.end > public:
            if node.start < public:
                self._core.tree.split(node, public - node.start)
            node.retention = replace(node.retention or Retention(), stored=False)

    def _shared(self, lease: Lease, pages: PageIds, count: int) -> None:
        """The first `count` private pages of a lease are the tree's now, or others for them."""
        lease.keep(PageIds(lease.private_pages[count * PAGE_ID_BYTES :]))
        lease.tree_pages = PageIds(lease.tree_pages + pages)
        self.counters.committed_pages += count

    def _committed(self, lease: Lease, node: Node, first: int) -> None:
        """The pages of `node` from page `first` on are shared now."""
        if lease.priority:
            node.priority = max(node.priority, lease.priority)
        if self.events.enabled:
            self._core.announce_stored(node, DEVICE, first)
        self._writer.committed(node)


def _within(tail: Node, last: int) -> Node:
    """The lowest node of a path that ends at page `last` or before."""
    node = tail
    while node.end > last and node.parent is not None:
        node = node.parent
    return node


def _check_pools(core: Core) -> None:
    for component in core.components:
        device, host = component.pool or (1, core.config.host_pages)
        if device < 1 or (host > 0) != (core.config.host_pages > 0):
            raise ConfigError(
                f"component {component.name} has {device} device and {host} host pages: give it "
                "both, or a host pool to none of them"
            )
