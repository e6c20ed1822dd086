"""checks(): recompute from scratch what the manager keeps incrementally, and compare.

Proves that every page of every pool has exactly one owner, that locks equal the guards that are
alive, and that the tree's structure, counters and eviction orders equal their definitions. In small
pieces, between which an engine may look whether there is anything else to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.components import Guard, window_of
from quire.errors import InvariantError
from quire.manager.audits import Audits
from quire.manager.core import ROOT_SLOT, Core
from quire.manager.fetches import Fetches
from quire.manager.foreign import ForeignDevice
from quire.manager.lease import Lease
from quire.tree import NUM_TIERS, Holding, Node, Root, may_go, slot_of
from quire.types import (
    DEVICE,
    HOST,
    PAGE_KEY_BYTES,
    READY,
    PageIds,
    Residency,
    Tier,
    num_pages,
    page_array,
)

PIECE = 256
"""Nodes that are looked at between two yields."""


def checks(
    core: Core,
    leases: Iterable[Lease],
    fetches: Fetches,
    foreign: ForeignDevice,
    audits: Audits,
) -> Iterator[None]:
    """Yields between pieces of the work; nothing may change until it is exhausted."""
    leases = list(leases)
    core.tree.stays.catch_up()
    yield from _check_structure(core)
    yield from _check_locks(core, leases, audits)
    yield from _check_owners(core, leases, [fetches, foreign, audits])
    _require(
        fetches.inflight_pages == fetches.count_inflight(), "the in-flight budget is miscounted"
    )
    if core.has_quotas:
        _check_claims(core, leases, fetches)
    yield from _check_orders(core)


def _check_claims(core: Core, leases: list[Lease], fetches: Fetches) -> None:
    """What tenants have beside what the tree knows of."""
    private: Counter[str] = Counter()
    for lease in leases:
        assert lease.tenant is not None
        private[lease.tenant.name] += num_pages(lease.private_pages)
    for tenant in core.tree.tenants.values():
        _require(tenant.num_private == private[tenant.name], "private pages are miscounted")
    coming = sum(map(fetches.coming_for, core.tree.tenants.values()))
    _require(coming <= fetches.inflight_pages, "pages on their way to tenants are miscounted")


def _require(condition: object, what: str, node: Node | None = None) -> None:
    # The node is only described when something is wrong: this runs millions of times in tests.
    if not condition:
        raise InvariantError(what if node is None else f"{node}: {what}")


def _nodes(core: Core) -> Iterator[Node]:
    """Parents first. However many children a node has, coming to the next costs the same."""
    paths: list[Iterator[Node]] = [iter(core.tree.roots.values())]
    while paths:
        node = next(paths[-1], None)
        if node is None:
            paths.pop()
            continue
        if node.children is not None:
            paths.append(iter(node.children.values()))
        if not isinstance(node, Root):
            yield node


def _check_structure(core: Core) -> Iterator[None]:
    window = window_of(core.components)
    for root in core.tree.roots.values():
        _require(bool(root.children) or root.users > 0, "an empty root without users was kept")
    for at, node in enumerate(_nodes(core)):
        if at % PIECE == 0:
            yield
        root, parent = core.tree.root_of(node), node.parent
        assert parent is not None
        size = node.num_pages
        overlap = root.page_width - root.page_bytes
        _require(size > 0, "is empty", node)
        _require(any(node.held), "holds nothing", node)
        _require(len(node.tokens) == size * root.page_bytes + overlap, "tokens", node)
        key = hash(bytes(node.tokens[: root.page_width]))
        _require((parent.children or {}).get(key) is node, "is not under its first page", node)
        if node.page_keys is not None:
            _require(len(node.page_keys) == size * PAGE_KEY_BYTES, "page keys", node)
        _require(node.held[DEVICE] or node.held[HOST], "has no full pages", node)
        below = (node.children or {}).values()
        _require(node.device_below == sum(c.held[DEVICE] is not None for c in below), "below", node)
        _require(node.host_below == sum(c.held[HOST] is not None for c in below), "below", node)
        for slot, holding in enumerate(node.held):
            if holding is not None:
                size = 1 if slot in core.tree.points else node.num_pages
                _require(num_pages(holding.pages) == size, "pages of a holding", node)
                _check_holding(node, slot, holding)
        if core.upkeep is not None and node.children is None:
            used = any(h is not None and (h.locks or h.state is not READY) for h in node.held)
            _require(used or core.upkeep.is_usable(node), "is dead weight", node)
        if core.upkeep is not None and window is not None:
            mine = [node.held[slot_of(window.index, tier)] for tier in Tier]
            idle = [h for h in mine if h is not None and h.state is READY]
            if idle and not any(h is not None and h.locks for h in mine):
                _require(core.upkeep.is_needed(node), "has window pages nobody needs", node)


def _check_holding(node: Node, slot: int, holding: Holding) -> None:
    parent = node.parent
    assert parent is not None
    _require(holding.node is node, "holding of another node", node)
    _require(holding.state is not Residency.ABSENT, "an absent holding", node)
    closed = isinstance(parent, Root) or parent.held[slot] is not None
    reasons = (holding.locks > 0) + (holding.state is not READY) + holding.owes
    if slot == DEVICE:
        _require(closed, "is on the device below a parent that is not", node)
        _require(
            holding.owes or node.held[HOST] or not node.host_below or holding.forgiven,
            "owes the host a copy and does not know it",
            node,
        )
    if slot <= HOST:
        below = [child.held[slot] for child in (node.children or {}).values()]
        reasons += sum(h is not None and h.reasons > 0 for h in below)
    _require(holding.reasons == reasons, "the reasons for which it stays are miscounted", node)


def _check_locks(core: Core, leases: list[Lease], audits: Audits) -> Iterator[None]:
    held: list[list[Guard]] = [lease.guards for lease in leases]
    held += audits.guards
    held += [op.guards for op in core.operations.running.values()]
    locks: Counter[int] = Counter()
    users: Counter[int] = Counter()
    for slot, tail, stop in (guard for guards in held for guard in guards):
        if slot == ROOT_SLOT:
            users[id(tail)] += 1
            continue
        path = [tail] if slot in core.tree.points else core.tree.path(tail, stop)
        for node in path:
            holding = node.held[slot]
            _require(holding is not None, "is locked and absent", node)
            locks[id(holding)] += 1
    for root in core.tree.roots.values():
        _require(root.users == users.pop(id(root), 0), "a root's users are miscounted")
    _require(not users, "somebody uses a root that is gone")
    for at, node in enumerate(_nodes(core)):
        if at % PIECE == 0:
            yield
        for holding in node.held:
            if holding is not None:
                due = locks.pop(id(holding), 0)
                _require(holding.locks == due, "locks are miscounted", node)
    _require(not locks, "somebody holds a node that is gone")


class _Marked:
    """Pages of a pool that somebody has."""

    def __init__(self, num_pages: int) -> None:
        self.pages = np.zeros(num_pages, dtype=np.bool_)
        self.count = 0
        self.found: list[PageIds] = []
        """To be marked."""

    def mark(self) -> None:
        pages, self.found = PageIds(b"".join(self.found)), []
        self.pages[page_array(pages)] = True
        self.count += num_pages(pages)

    def are_distinct(self) -> bool:
        return int(np.count_nonzero(self.pages)) == self.count


def _check_owners(
    core: Core, leases: list[Lease], others: Sequence[Fetches | ForeignDevice | Audits]
) -> Iterator[None]:
    owned = [_Marked(allocator.num_pages) for allocator in core.allocators]
    for at, node in enumerate(_nodes(core)):
        if at % PIECE == 0:
            for marked in owned:
                marked.mark()
            yield
        for slot, holding in enumerate(node.held):
            if holding is not None:
                owned[slot].found.append(holding.pages)
    for lease in leases:
        owned[DEVICE].found.append(lease.private_pages)
        if lease.state is not None:
            for component in core.components:
                slot = slot_of(component.index, DEVICE)
                owned[slot].found.append(lease.state.private_pages(component))
    for slot, (allocator, used) in enumerate(zip(core.allocators, owned, strict=True)):
        yield
        free = _Marked(allocator.num_pages)
        free.found.append(PageIds(allocator.free_pages().tobytes()))
        for other in others:
            used.found += other.reserved_pages(slot)
        free.mark()
        used.mark()
        _require(used.are_distinct(), f"slot {slot}: a page has two owners")
        _require(free.are_distinct(), f"slot {slot}: a page is free twice")
        _require(not (used.pages & free.pages).any(), f"slot {slot}: a free page has an owner")
        everything = used.count + free.count
        _require(everything == allocator.num_pages, f"slot {slot}: {everything} pages accounted")


def _check_orders(core: Core) -> Iterator[None]:
    tree = core.tree
    queued: list[set[int]] = [set() for _ in tree.standing.orders]
    spare: list[set[int]] = [set() for _ in tree.standing.spare]
    orders: list[Iterable[Holding]] = [tree.standing.coldest(s) for s in range(tree.num_slots)]
    for retained in tree.standing.retained:
        pages = sum(num_pages(holding.pages) for holding in retained.sizes)
        _require(pages == sum(retained.sizes.values()), "what is retained is miscounted")
        unasked = [holding for holding in retained.sizes if not retained.is_asked_for(holding)]
        _require(not unasked, f"{unasked} stand to be kept, which nobody asks of their tier")
    for found, holdings in zip([*queued, *spare], [*orders, *tree.standing.spare], strict=True):
        for at, holding in enumerate(holdings):
            if at % PIECE == 0:
                yield
            found.add(id(holding))
    seen, movable = 0, [0] * tree.num_slots
    for at, node in enumerate(_nodes(core)):
        if at % PIECE == 0:
            yield
        for slot, held in enumerate(node.held):
            if held is None:
                continue
            component, tier = divmod(slot, NUM_TIERS)
            device = node.held[slot - tier]
            on_device = device is not None and device.state is READY
            ready = held.state is READY
            may_spare = tier == HOST and on_device and ready
            name = id(held)
            present = name in queued[slot] or (may_spare and name in spare[component])
            seen += present
            _require(present == (held.queue is not None), "in the wrong order", node)
            _require(ready or not present, "is ordered but not READY", node)
            if ready and not present:
                _require(not may_go(held, slot), "could go but is not ordered", node)
            if not held.reasons:
                movable[slot] += num_pages(held.pages)
    _require(movable == tree.stays.movable, "the pages that may go are miscounted")
    if tree.counts_pages:
        _check_quotas(core)
    total = sum(map(len, queued)) + sum(map(len, spare))
    _require(seen == total, "an order holds something that is not in the tree")


def _check_quotas(core: Core) -> None:
    held: Counter[tuple[str, int]] = Counter()
    for node in _nodes(core):
        name = core.tree.root_of(node).tenant.name
        for slot, holding in enumerate(node.held):
            held[name, slot] += num_pages(holding.pages) if holding is not None else 0
    for tenant in core.tree.tenants.values():
        counted = [held[tenant.name, slot] for slot in range(core.tree.num_slots)]
        _require(tenant.num_held == counted, "a tenant's pages are miscounted")
