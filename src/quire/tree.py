"""PrefixTree: which prefixes are held where. Metadata only: no I/O, no torch, no clock.

A node is a run of pages; its path from the root spells a prefix. For each component and each tier
it may have a `Holding`: the pool pages, their residency state and how many users protect them.
The tree knows nothing of what a component means. It offers the moves (walk, grow, split, attach,
detach, lock) and keeps its orders of eviction; `quire.components` decides what is usable and what
may go, `quire.manager` decides when.

Splits. `split(node, n)` puts a *new* node above `node`; the object itself keeps the lower end:

    parent ── node [0 ······ 9]          parent ── upper [0 ·· n) ── node [n ·· 9]

so whoever remembers a node as the end of what it uses (a lease, an operation) need not be told:
walking up from it still passes exactly the same pages.

Device holdings are closed upwards: a node holds a component on the device only below a parent
that does. Host holdings need not be: a host page may hang below a page that only the device has.

L3 is not a tier here; a node only remembers its page keys, once somebody needed them, and
whether the attached store has all of its pages (`stored` = the store's epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from quire.errors import InvariantError
from quire.eviction import EvictionPolicy, Queue
from quire.keys import Namespace, PrefixKey, chain_keys, common_pages
from quire.types import PAGE_ID_BYTES, PAGE_KEY_BYTES, PageIds, Residency, Tier

NUM_TIERS = len(Tier)
_READY = Residency.READY


def slot_of(component: int, tier: Tier) -> int:
    """Index of (component, tier) in Node.held."""
    return component * NUM_TIERS + tier


class Holding:
    """What one tier holds of one component of one node. Absent ones have no Holding at all."""

    __slots__ = ("_next", "_prev", "branches", "locks", "node", "pages", "queue", "state")

    def __init__(self, node: Node, pages: PageIds, state: Residency) -> None:
        self.node = node
        self.pages = pages
        self.state = state
        self.locks = 0
        self.branches = 0
        """Device only: children that hold the same component on the device."""
        self.queue: Queue | None = None
        """The eviction queue it stands in; None while FILLING, DRAINING or parked."""
        self._prev: Holding | Queue | None = None
        self._next: Holding | Queue | None = None


class Node:
    __slots__ = (
        "children",
        "end",
        "held",
        "hits",
        "page_keys",
        "parent",
        "priority",
        "stamp",
        "stored",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes, end: int, num_slots: int) -> None:
        self.parent = parent
        self.tokens = tokens
        """Tokens of its pages, overlap included."""
        self.end = end
        """Pages from the root to its end."""
        self.children: dict[int, Node] | None = None
        """By hash of the first page's tokens. The tokens themselves are always compared."""
        self.held: list[Holding | None] = [None] * num_slots
        self.hits = 0
        self.priority = 0
        self.stamp = 0.0
        """For policies that need a time."""
        self.page_keys: bytes | None = None
        self.stored = 0
        """Epoch of the store known to hold every page of every component; 0: not known to."""

    @property
    def start(self) -> int:
        return self.parent.end if self.parent is not None else 0

    @property
    def num_pages(self) -> int:
        return self.end - self.parent.end if self.parent is not None else 0

    def __repr__(self) -> str:
        tiers = [f"{s}:{h.state.name}" for s, h in enumerate(self.held) if h is not None]
        return f"Node({self.start}..{self.end} {' '.join(tiers)})"


class Root(Node):
    """Top of one namespace's tree: no pages of its own."""

    __slots__ = ("digest", "page_bytes", "page_width", "users")

    def __init__(self, namespace: Namespace, key: PrefixKey, num_slots: int) -> None:
        super().__init__(None, b"", 0, num_slots)
        self.digest = namespace.digest
        self.page_bytes = key.page_bytes
        self.page_width = key.page_width
        self.users = 0
        """Leases below; an empty root without users is dropped."""


class Walk(NamedTuple):
    """Nodes along a key, and how many of its pages they cover; the last may be covered partly."""

    nodes: list[Node]
    num_pages: int


class Inserted(NamedTuple):
    tail: Node
    """Last node on the path that carries the pages; `tail.end` says how far that is."""
    pages: PageIds
    """Pages of the tree for [first, tail.end): the caller's where adopted, else its twins."""
    duplicate: PageIds
    """The caller's pages that the tree had already: to be freed by the caller."""
    adopted: list[Node]
    """Nodes that took the caller's pages."""


class Freed(NamedTuple):
    """Pages that left the tree and belong to the caller now."""

    component: int
    tier: Tier
    pages: PageIds
    node: Node
    was_ready: bool
    was_last: bool
    """The node held them nowhere else."""


class PrefixTree:
    def __init__(
        self, num_components: int, make_order: Callable[[int, Tier], EvictionPolicy]
    ) -> None:
        self.num_components = num_components
        self.num_slots = num_components * NUM_TIERS
        self.roots: dict[bytes, Root] = {}
        self.orders = [make_order(c, tier) for c in range(num_components) for tier in Tier]
        """Eviction order per slot. Host holdings are in theirs only while the device lacks them."""
        self.spare = [Queue() for _ in range(num_components)]
        """Per component: host holdings whose pages are READY on the device too, and likely to stay
        there for a while."""
        self.changes = 0
        """Grows with every change that can make an earlier walk wrong."""

    # ---- reading --------------------------------------------------------------------------------

    def walk(self, key: PrefixKey, start: Node | None = None) -> Walk:
        """Longest run of nodes whose tokens equal the key's. Changes nothing.

        `start` is a node known to lie on the key's path: only what is below it is walked.
        """
        nodes: list[Node] = []
        node = start or self.roots.get(key.namespace.digest)
        if node is None:
            return Walk(nodes, 0)
        data, step, width = key.data, key.page_bytes, key.page_width
        overlap = width - step
        at, last = node.end, key.last
        while at < last and node.children is not None:
            offset = at * step
            child = node.children.get(hash(data[offset : offset + width]))
            if child is None:
                break
            tokens = child.tokens
            if child.end <= last and data.startswith(tokens, offset):
                nodes.append(child)
                node, at = child, child.end
                continue
            shared = common_pages(data[offset : last * step + overlap], tokens, step, width)
            if shared:
                nodes.append(child)
                at += shared
            break
        return Walk(nodes, at)

    def path(self, tail: Node, stop: Node | None = None) -> Iterator[Node]:
        """Nodes from `tail` upwards, to below `stop` (default: to below the root)."""
        node: Node | None = tail
        while node is not stop and node is not None and node.parent is not None:
            yield node
            node = node.parent

    def keys_of(self, node: Node) -> bytes:
        """Page keys of a node, computed once from the nearest ancestor that has its own."""
        if node.page_keys is None:
            chain: list[Node] = []
            at = node
            while at.page_keys is None and at.parent is not None:
                chain.append(at)
                at = at.parent
            root = self.root_of(at)
            key = at.page_keys[-PAGE_KEY_BYTES:] if at.page_keys else root.digest
            for missing in reversed(chain):
                missing.page_keys = chain_keys(
                    key, missing.tokens, root.page_bytes, root.page_width
                )
                key = missing.page_keys[-PAGE_KEY_BYTES:]
        assert node.page_keys is not None
        return node.page_keys

    def root_of(self, node: Node) -> Root:
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node

    # ---- structure ------------------------------------------------------------------------------

    def root(self, key: PrefixKey) -> Root:
        """The key's root, made if need be."""
        digest = key.namespace.digest
        root = self.roots.get(digest)
        if root is None:
            root = self.roots[digest] = Root(key.namespace, key, self.num_slots)
        return root

    def drop_root_if_unused(self, root: Root) -> None:
        if not root.children and root.users == 0:
            self.roots.pop(root.digest, None)

    def split(self, node: Node, count: int) -> Node:
        """Cut off the first `count` pages of `node` as its new parent, and return that."""
        parent = node.parent
        assert parent is not None
        assert 0 < count < node.num_pages
        root = self.root_of(node)
        step, width = root.page_bytes, root.page_width
        first, tokens = hash(node.tokens[:width]), node.tokens
        upper = Node(parent, tokens[: count * step + width - step], node.start + count, 0)
        upper.hits, upper.priority, upper.stamp = node.hits, node.priority, node.stamp
        upper.stored = node.stored
        upper.held = [
            h and self._split_holding(s, h, upper, count) for s, h in enumerate(node.held)
        ]
        if node.page_keys is not None:
            cut = count * PAGE_KEY_BYTES
            upper.page_keys, node.page_keys = node.page_keys[:cut], node.page_keys[cut:]
        node.tokens = tokens[count * step :]
        node.parent = upper
        assert parent.children is not None
        parent.children[first] = upper
        upper.children = {hash(node.tokens[:width]): node}
        self.changes += 1
        return upper

    def _split_holding(self, slot: int, lower: Holding, upper: Node, count: int) -> Holding:
        cut = count * PAGE_ID_BYTES
        holding = Holding(upper, PageIds(lower.pages[:cut]), lower.state)
        lower.pages = PageIds(lower.pages[cut:])
        holding.locks = lower.locks
        if slot % NUM_TIERS == Tier.DEVICE:
            holding.branches = 1
        if lower.queue is not None:
            if lower.queue is self.spare[slot // NUM_TIERS]:
                lower.queue.insert_after(lower, holding)
            else:
                self.orders[slot].split(lower, holding)
        return holding

    def insert(self, at: Node, key: PrefixKey, last: int, slot: int, pages: PageIds) -> Inserted:
        """Put `pages` under `at` as the key's pages [at.end, last), READY in `slot`.

        Walks what is there already: a node without this holding adopts the caller's pages, one
        that is READY makes them duplicates. Stops before a node whose holding is FILLING or
        DRAINING, which can neither be shared nor replaced; `tail.end` says how far it came.
        """
        first, node, position = at.end, at, at.end
        data, step, width = key.data, key.page_bytes, key.page_width
        taken: list[bytes] = []
        duplicate: list[bytes] = []
        adopted: list[Node] = []
        while position < last:
            name = hash(data[position * step : position * step + width])
            child = node.children.get(name) if node.children is not None else None
            if child is None:
                child = self._grow(node, name, key.page_tokens(position, last), last)
            elif (child := self._cut_along(child, key, position, last)) is None:
                break  # two different pages with one 64-bit hash: leave the newcomer out
            start, end = (position - first) * PAGE_ID_BYTES, (child.end - first) * PAGE_ID_BYTES
            mine = PageIds(pages[start:end])
            holding = child.held[slot]
            if holding is None:
                self.attach(child, slot, mine, Residency.READY)
                adopted.append(child)
                taken.append(mine)
            elif holding.state is _READY:
                duplicate.append(mine)
                taken.append(holding.pages)
            else:
                break
            node, position = child, child.end
        return Inserted(node, PageIds(b"".join(taken)), PageIds(b"".join(duplicate)), adopted)

    def _cut_along(self, child: Node, key: PrefixKey, position: int, last: int) -> Node | None:
        """What `child` shares with the key's pages [position, last), split off if need be."""
        if child.end <= last and key.data.startswith(child.tokens, position * key.page_bytes):
            return child
        wanted = key.page_tokens(position, min(child.end, last))
        shared = common_pages(wanted, child.tokens, key.page_bytes, key.page_width)
        if shared == 0:
            return None
        return child if shared == child.num_pages else self.split(child, shared)

    def _grow(self, parent: Node, name: int, tokens: bytes, end: int) -> Node:
        node = Node(parent, tokens, end, self.num_slots)
        if parent.children is None:
            parent.children = {}
        parent.children[name] = node
        self.changes += 1
        return node

    # ---- holdings -------------------------------------------------------------------------------

    def attach(self, node: Node, slot: int, pages: PageIds, state: Residency) -> Holding:
        """Give an absent (node, slot) its pages, FILLING or READY."""
        assert node.held[slot] is None
        holding = node.held[slot] = Holding(node, pages, state)
        if slot % NUM_TIERS == Tier.DEVICE:
            parent = node.parent
            above = parent.held[slot] if parent is not None else None
            if above is not None:
                above.branches += 1
        if state is _READY:
            self._enter_orders(holding, slot)
        self.changes += 1
        return holding

    def make_ready(self, node: Node, slot: int) -> None:
        """FILLING → READY: the bytes have arrived."""
        holding = node.held[slot]
        assert holding is not None
        assert holding.state is Residency.FILLING
        holding.state = Residency.READY
        self._enter_orders(holding, slot)
        self.changes += 1

    def keep_spare(self, node: Node, slot: int) -> None:
        """The device will let go of `node` soon: rank its host copy as if it had already."""
        holding = node.held[slot]
        if holding is not None and holding.queue is self.spare[slot // NUM_TIERS]:
            holding.queue.remove(holding)
            self.orders[slot].insert(holding)

    def condemn(self, node: Node, slot: int) -> list[Freed]:
        """→ DRAINING: unreadable from now on; detached as soon as nothing uses it any more."""
        holding = node.held[slot]
        assert holding is not None
        self._leave_orders(holding, slot)
        holding.state = Residency.DRAINING
        if slot % NUM_TIERS == Tier.DEVICE:
            self._promote_host(node, slot)
        self.changes += 1
        return self.detach(node, slot) if self._is_drained(holding) else []

    def detach(self, node: Node, slot: int) -> list[Freed]:
        """→ ABSENT. A node that holds nothing any more leaves, with all that hangs below it."""
        freed: list[Freed] = []
        at: Node | None = node
        while at is not None:
            self._detach(at, slot, freed)
            if not any(at.held):
                self._prune(at, freed)
            # What drains above it may have waited only for this.
            at = at.parent
            above = at.held[slot] if at is not None else None
            if above is None or not self._is_drained(above):
                break
        return freed

    def _detach(self, node: Node, slot: int, freed: list[Freed]) -> None:
        held = node.held
        holding = held[slot]
        assert holding is not None
        if holding.locks or holding.branches:
            raise InvariantError(f"{node} is freed while something uses it")
        component, tier = divmod(slot, NUM_TIERS)
        self._leave_orders(holding, slot)
        node.held[slot] = None
        if tier == Tier.DEVICE:
            self._expose_device(node, slot)
        ready, last = holding.state is _READY, not any(node.held)
        freed.append(Freed(component, Tier(tier), holding.pages, node, ready, last))
        self.changes += 1

    def _expose_device(self, node: Node, slot: int) -> None:
        """The device let go of `node`: its parent may be a leaf now, its host copy is no spare."""
        parent = node.parent
        above = parent.held[slot] if parent is not None else None
        if above is not None:
            above.branches -= 1
            if above.branches == 0 and above.locks == 0 and above.state is _READY:
                self.orders[slot].unpark(above)
        self._promote_host(node, slot)

    def _promote_host(self, node: Node, slot: int) -> None:
        """The device copy is of no use any more: the host copy is no spare."""
        host = node.held[slot + 1]
        if host is not None and host.state is _READY:
            self._leave_orders(host, slot + 1)
            self.orders[slot + 1].insert(host)

    def _prune(self, node: Node, freed: list[Freed]) -> None:
        """Remove an empty node. What hangs below is unreachable now and goes too."""
        parent = node.parent
        assert parent is not None
        root = self.root_of(node)
        assert parent.children is not None
        del parent.children[hash(node.tokens[: root.page_width])]
        if not parent.children:
            parent.children = None
        doomed = [node]
        while doomed:
            at = doomed.pop()
            for slot, holding in enumerate(at.held):
                if holding is not None:
                    self._detach(at, slot, freed)
            doomed.extend(at.children.values() if at.children else ())
            at.children = None
        if isinstance(parent, Root):
            self.drop_root_if_unused(parent)
        else:
            self._unpark_host(parent)

    def _unpark_host(self, node: Node) -> None:
        if node.children is None:
            for slot in range(Tier.HOST, self.num_slots, NUM_TIERS):
                holding = node.held[slot]
                if holding is not None and self._is_order_member(holding, slot):
                    self.orders[slot].unpark(holding)

    def _is_order_member(self, holding: Holding, slot: int) -> bool:
        """Does it belong into the slot's eviction order (queued or parked), not among spares?"""
        if holding.state is not _READY:
            return False
        return slot % NUM_TIERS == Tier.DEVICE or not self._on_device(holding.node, slot - 1)

    def _on_device(self, node: Node, device_slot: int) -> bool:
        device = node.held[device_slot]
        return device is not None and device.state is _READY

    def _enter_orders(self, holding: Holding, slot: int) -> None:
        if slot % NUM_TIERS == Tier.DEVICE:
            self.orders[slot].insert(holding)
            host = holding.node.held[slot + 1]
            if host is not None and host.state is _READY:
                self._leave_orders(host, slot + 1)
                self.spare[slot // NUM_TIERS].push_hot(host)
        elif self._on_device(holding.node, slot - 1):
            self.spare[slot // NUM_TIERS].push_hot(holding)
        else:
            self.orders[slot].insert(holding)

    def _leave_orders(self, holding: Holding, slot: int) -> None:
        if holding.queue is self.spare[slot // NUM_TIERS]:
            holding.queue.remove(holding)
        elif holding.state is _READY:
            self.orders[slot].remove(holding)

    # ---- protection -----------------------------------------------------------------------------

    def lock(self, tail: Node, stop: Node | None, slot: int) -> None:
        """Protect the slot's holdings of the nodes from `tail` up to below `stop`."""
        node = tail
        while node is not stop and node.parent is not None:
            holding = node.held[slot]
            assert holding is not None
            holding.locks += 1
            node = node.parent

    def unlock(self, tail: Node, stop: Node | None, slot: int) -> list[Freed]:
        """Undo one lock. Frees what was only draining."""
        freed: list[Freed] = []
        node = tail
        while node is not stop and (parent := node.parent) is not None:
            holding = node.held[slot]
            assert holding is not None
            holding.locks -= 1
            if holding.locks == 0 and holding.queue is None:
                if holding.state is _READY:
                    self._bring_back(holding, slot)
                elif self._is_drained(holding):
                    freed += self.detach(node, slot)
            node = parent
        return freed

    def touch(self, tail: Node) -> None:
        """Everything on the path was used: children first, so that parents rank as hotter."""
        orders = self.orders
        node = tail
        while node.parent is not None:
            held = node.held
            for device in range(0, self.num_slots, NUM_TIERS):
                holding, slot = held[device], device
                if holding is None or holding.state is not _READY:
                    holding, slot = held[device + Tier.HOST], device + Tier.HOST
                if holding is not None and holding.state is _READY:
                    orders[slot].touch(holding)
            node = node.parent

    def _bring_back(self, holding: Holding, slot: int) -> None:
        """A parked holding may go again."""
        if slot % NUM_TIERS == Tier.HOST and self._on_device(holding.node, slot - 1):
            self.spare[slot // NUM_TIERS].push_hot(holding)
        else:
            self.orders[slot].unpark(holding)

    def _is_drained(self, holding: Holding) -> bool:
        unused = holding.locks == 0 and holding.branches == 0
        return unused and holding.state is Residency.DRAINING
