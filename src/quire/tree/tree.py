"""PrefixTree: which prefixes are held where. Metadata only: no I/O, no torch, no clock.

A node is a run of pages; its path from the root spells a prefix. For each component and each tier
it may have a `Holding`: the pool pages, their residency state and how many users protect them.
The tree knows nothing of what a component means. It offers the moves (walk, grow, split, attach,
detach, lock) and keeps its orders of eviction; `quire.components` decides what is usable and what
may go, `quire.manager` decides when.

Splits. `split(node, n)` puts a *new* node above `node`; the object itself keeps the lower end:

    parent ── node [0 ······ 9]          parent ── upper [0 ·· n) ── node [n ·· 9]

so whoever remembers a node as the end of what it uses (a lease, an operation) need not be told:
walking up from it still passes exactly the same pages. The way back is in joining.py: neighbours
that are alike in everything, and that nobody names, become one node again. And a leaf that only
the device has, used by one request, grows in place. So a tree has forks and ends, and not a node
for each commit.

The first component is `full`, of which every page of a prefix is needed: a node that has it in no
tier any more goes, with everything else it held. Its device holdings are closed upwards: a node
has them only below a parent that does. Host holdings are too, but for what has just come from
elsewhere below a page that only the device has (see stays.py).

A holding has one page for each of its node's, or, for *point* components, a single one that
belongs to the node's end and stays there when the node is split.

L3 is not a tier here; a node only remembers its page keys, once somebody needed them, and
whether the attached store has all of its pages (`stored` = the store's epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quire.errors import InvariantError
from quire.eviction import EvictionPolicy
from quire.keys import PrefixKey, chain_keys, common_pages
from quire.tree.node import (
    NUM_TIERS,
    Freed,
    Holding,
    Inserted,
    Node,
    Root,
    Tenant,
    Walk,
    slot_of,
)
from quire.tree.standing import Standing
from quire.tree.stays import Stays
from quire.types import (
    DEVICE,
    DRAINING,
    FILLING,
    HOST,
    NO_PAGES,
    PAGE_ID_BYTES,
    PAGE_KEY_BYTES,
    READY,
    PageIds,
    Residency,
    Tier,
    num_pages,
    tenant_of,
)


class PrefixTree:
    def __init__(
        self,
        num_components: int,
        make_order: Callable[[int, Tier], EvictionPolicy],
        points: Sequence[int] = (),
        *,
        clock: Callable[[], float] = lambda: 0.0,
        max_retained: Sequence[int] | None = None,
        counts_pages: bool = False,
    ) -> None:
        """`points`: which components hold a single page, at the end of a node. `max_retained`: by
        slot, pages that may be retained, which needs a clock; None: none are. `counts_pages`: of
        each tenant, for quotas."""
        self.counts_pages = counts_pages
        self.num_components = num_components
        self.num_slots = num_components * NUM_TIERS
        self.points = frozenset(slot_of(c, tier) for c in points for tier in Tier)
        """Slots of point components."""
        self.roots: dict[bytes, Root] = {}
        self.tenants: dict[str, Tenant] = {}
        bounds = max_retained or [0] * self.num_slots
        self.standing = Standing(num_components, make_order, clock, bounds)
        self.stays = Stays(self.num_slots, self.standing)
        self.changes = 0
        """Grows with every change that can make an earlier walk wrong."""
        self.uses = 0
        """Grows with every lock, its end and every touch."""

    # ---- reading --------------------------------------------------------------------------------

    def walk(self, key: PrefixKey, start: Node | None = None) -> Walk:
        """Longest run of nodes whose tokens equal the key's. Changes nothing.

        `start` is a node known to lie on the key's path: only what is below it is walked.
        """
        nodes: list[Node] = []
        path = key.path
        node = start or self.roots.get(path.namespace.digest)
        if node is None:
            return Walk(nodes, 0)
        data, step, width = path.data, path.page_bytes, path.page_width
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
            rest = data[offset : last * step + width - step]
            shared = common_pages(rest, bytes(tokens), step, width)
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

    def is_whole(self, tail: Node, slot: int) -> bool:
        """Does this slot hold all of the path to `tail`, READY? Then a lock on its end keeps it."""
        node = tail
        while (parent := node.parent) is not None:
            holding = node.held[slot]
            if holding is None or holding.state is not READY:
                return False
            node = parent
        return True

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        for root in self.roots.values():
            stack = list((root.children or {}).values())
            while stack:
                node = stack.pop()
                stack.extend((node.children or {}).values())
                yield node

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
                    key, bytes(missing.tokens), root.page_bytes, root.page_width
                )
                key = missing.page_keys[-PAGE_KEY_BYTES:]
        assert node.page_keys is not None
        return node.page_keys

    def last_key_of(self, node: Node) -> bytes:
        """Key of a node's last page."""
        return self.keys_of(node)[-PAGE_KEY_BYTES:]

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
            tenant = self.tenant(key)
            self.tenants[tenant.name] = tenant
            root = self.roots[digest] = Root(key, tenant, self.num_slots)
            tenant.roots[root] = None
        return root

    def tenant(self, key: PrefixKey) -> Tenant:
        """Whose it is; one that has nothing, if nothing of it is known."""
        name = tenant_of(key.namespace.salt)
        return self.tenants.get(name) or Tenant(name, self.num_slots)

    def drop_root_if_unused(self, root: Root) -> None:
        if not root.children and root.users == 0 and root.digest in self.roots:
            del self.roots[root.digest]
            tenant = root.tenant
            del tenant.roots[root]
            if not tenant.roots:
                del self.tenants[tenant.name]

    def split(self, node: Node, count: int) -> Node:
        """Cut off the first `count` pages of `node` as its new parent, and return that."""
        parent = node.parent
        assert parent is not None
        assert 0 < count < node.num_pages
        self.stays.catch_up()
        root = self.root_of(node)
        step, width = root.page_bytes, root.page_width
        tokens = node.tokens
        upper = Node(
            parent, node.name, tokens[: count * step + width - step], node.start + count, 0
        )
        upper.hits, upper.priority, upper.stamp = node.hits, node.priority, node.stamp
        upper.retention = node.retention
        upper.stored, upper.given_up = node.stored, node.given_up
        upper.last_use = node.last_use
        if node.others_stored is not None:
            points = {slot // NUM_TIERS for slot in self.points}
            upper.others_stored = {c: e for c, e in node.others_stored.items() if c not in points}
        upper.device_below = int(node.held[DEVICE] is not None)
        upper.host_below = int(node.held[HOST] is not None)
        upper.held = [
            h and self._split_holding(s, h, upper, count) for s, h in enumerate(node.held)
        ]
        if node.page_keys is not None:
            cut = count * PAGE_KEY_BYTES
            upper.page_keys, node.page_keys = node.page_keys[:cut], node.page_keys[cut:]
        node.tokens = tokens[count * step :]
        node.parent, node.start = upper, upper.end
        assert parent.children is not None
        parent.children[node.name] = upper
        node.name = hash(bytes(node.tokens[:width]))
        upper.children = {node.name: node}
        for slot in range(NUM_TIERS, self.num_slots, NUM_TIERS):
            self.stays.reckon(upper, slot)
        self.changes += 1
        return upper

    def node_at(self, tail: Node, end: int) -> Node:
        """The node of the path to `tail` that ends at page `end`, split off if need be."""
        node = tail
        while node.end != end:
            above = node.parent
            assert above is not None
            if above.end < end:
                return self.split(node, end - above.end)
            node = above
        return node

    def _split_holding(self, slot: int, lower: Holding, upper: Node, count: int) -> Holding | None:
        if slot in self.points:
            return None
        cut = count * PAGE_ID_BYTES
        holding = Holding(upper, PageIds(lower.pages[:cut]), lower.state)
        lower.pages = PageIds(lower.pages[cut:])
        holding.locks = lower.locks
        holding.forgiven = lower.forgiven
        holding.reasons = (lower.locks > 0) + (lower.state is not READY)
        if slot <= HOST:
            holding.reasons += lower.reasons > 0
        elif lower.reasons and not holding.reasons:  # it owes a copy, and so will this
            self.stays.movable[slot] += num_pages(holding.pages)
        self.standing.split(slot, lower, holding)
        return holding

    def insert(self, at: Node, key: PrefixKey, last: int, slot: int, pages: PageIds) -> Inserted:
        """Put `pages` under `at` as the key's pages [at.end, last), READY in `slot`.

        Walks what is there already: a node without this holding adopts the caller's pages, one
        that is READY makes them duplicates. Stops before a node whose holding is FILLING or
        DRAINING, which can neither be shared nor replaced; `tail.end` says how far it came.
        """
        first = at.end
        node, position = at, first
        path = key.path
        data, step, width = path.data, path.page_bytes, path.page_width
        taken: list[bytes] = []
        duplicate: list[bytes] = []
        adopted: list[Node] = []
        while position < last:
            name = hash(data[position * step : position * step + width])
            child = node.children.get(name) if node.children is not None else None
            if child is None:
                child = self._add(node, name, key.page_tokens(position, last), last)
                if node is at:  # all of it is new, as nearly always
                    self.attach(child, slot, pages, READY)
                    return Inserted(child, pages, NO_PAGES, [child])
            elif (child := self._cut_along(child, key, position, last)) is None:
                break  # two different pages with one 64-bit hash: leave the newcomer out
            start, end = (position - first) * PAGE_ID_BYTES, (child.end - first) * PAGE_ID_BYTES
            mine = PageIds(pages[start:end])
            holding = child.held[slot]
            if holding is None:
                self.attach(child, slot, mine, READY)
                adopted.append(child)
                taken.append(mine)
            elif holding.state is READY:
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
        shared = common_pages(wanted, bytes(child.tokens), key.page_bytes, key.page_width)
        if shared == 0:
            return None
        return child if shared == child.num_pages else self.split(child, shared)

    def _add(self, parent: Node, name: int, tokens: bytes, end: int) -> Node:
        node = Node(parent, name, tokens, end, self.num_slots)
        if parent.children is None:
            parent.children = {}
        parent.children[name] = node
        self.changes += 1
        return node

    def grow(self, node: Node, key: PrefixKey, last: int, pages: PageIds) -> bool:
        """Put `pages` at the end of `node` itself, as the key's pages [node.end, last) on the
        device: if it is a leaf of full pages alone, on the device alone, that one request at most
        uses. False: nothing was changed."""
        holding, end, path, tokens = node.held[DEVICE], node.end, key.path, node.tokens
        if holding is None or node.children is not None or node.held[HOST] is not None:
            return False
        if node.retention is not None:
            return False
        if holding.locks > 1 or holding.state is not READY or self.num_components > 1:
            return False
        if type(tokens) is bytes:
            tokens = node.tokens = bytearray(tokens)
        step = path.page_bytes
        overlap = path.page_width - step
        tokens += path.data[end * step + overlap : last * step + overlap]
        if node.page_keys is not None:
            key.anchor(end, node.page_keys[-PAGE_KEY_BYTES:])
            node.page_keys += key.page_keys(end, last)
        node.end = last
        holding.pages = PageIds(holding.pages + pages)
        if self.counts_pages:
            self.root_of(node).tenant.num_held[DEVICE] += last - end
        if not holding.reasons:
            self.stays.movable[DEVICE] += last - end
        node.stored = 0
        self.changes += 1
        return True

    # ---- holdings -------------------------------------------------------------------------------

    def attach(self, node: Node, slot: int, pages: PageIds, state: Residency) -> Holding:
        """Give an absent (node, slot) its pages, FILLING or READY."""
        assert node.held[slot] is None
        holding = node.held[slot] = Holding(node, pages, state)
        if self.counts_pages:
            self.root_of(node).tenant.num_held[slot] += num_pages(pages)
        self.stays.enter(node, slot, holding)
        if state is READY:
            self.standing.enter(holding, slot)
        self.changes += 1
        return holding

    def make_ready(self, node: Node, slot: int) -> None:
        """FILLING → READY: the bytes have arrived."""
        holding = node.held[slot]
        assert holding is not None
        assert holding.state is FILLING
        holding.state = READY
        self.standing.enter(holding, slot)
        self.stays.let_go(holding, slot)
        self.changes += 1

    def condemn(self, node: Node, slot: int) -> list[Freed]:
        """→ DRAINING: unreadable from now on; detached as soon as nothing uses it any more."""
        holding = node.held[slot]
        assert holding is not None
        self.standing.leave(holding, slot)
        if holding.state is READY:
            self.stays.hold_back(holding, slot)
        holding.state = DRAINING
        if slot % NUM_TIERS == DEVICE:
            self.stays.reckon(node, slot)
            self.standing.no_longer_spare(node, slot)
        self.changes += 1
        return self.detach(node, slot) if self._is_drained(node, slot) else []

    def detach(self, node: Node, slot: int) -> list[Freed]:
        """→ ABSENT. A node without its first component leaves, with all that hangs below it."""
        freed: list[Freed] = []
        at: Node | None = node
        while at is not None:
            self._detach(at, slot, freed)
            if at.held[DEVICE] is None and at.held[HOST] is None:
                self._prune(at, freed)
            # What drains above it may have waited only for this.
            at = at.parent
            if at is None or not self._is_drained(at, slot):
                break
        return freed

    def _detach(self, node: Node, slot: int, freed: list[Freed]) -> None:
        held = node.held
        holding = held[slot]
        assert holding is not None
        if holding.locks or (slot == DEVICE and node.device_below):
            raise InvariantError(f"{node} is freed while something uses it")
        self.stays.catch_up()
        self.standing.leave(holding, slot)
        held[slot] = None
        if self.counts_pages:
            self.root_of(node).tenant.num_held[slot] -= num_pages(holding.pages)
        self.stays.leave(node, slot, holding)
        if slot % NUM_TIERS == DEVICE:
            self.standing.no_longer_spare(node, slot)
        last = held[slot ^ 1] is None  # the same component in the other tier
        freed.append(Freed(slot, holding.pages, node, holding.state is READY, last))
        self.changes += 1

    def _prune(self, node: Node, freed: list[Freed]) -> None:
        """Remove a node. What it still holds, and what hangs below, is of no use and goes too."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.name]
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

    # ---- protection -----------------------------------------------------------------------------

    def lock(self, tail: Node, stop: Node | None, slot: int) -> None:
        """Protect the slot's holdings of the nodes from `tail` up to below `stop`."""
        if slot in self.points:
            stop = tail.parent
        self.uses += 1
        node = tail
        while node is not stop and (parent := node.parent) is not None:
            holding = node.held[slot]
            assert holding is not None
            holding.locks = locks = holding.locks + 1
            if locks == 1:
                self.stays.hold_back(holding, slot)
                if slot > HOST:
                    self.stays.reckon(node, slot)
            node = parent

    def unlock(self, tail: Node, stop: Node | None, slot: int) -> list[Freed]:
        """Undo one lock. Frees what was only draining."""
        freed: list[Freed] = []
        if slot in self.points:
            stop = tail.parent
        self.uses += 1
        node = tail
        while node is not stop and (parent := node.parent) is not None:
            holding = node.held[slot]
            assert holding is not None
            holding.locks = locks = holding.locks - 1
            if locks == 0:
                if slot > HOST:
                    self.stays.reckon(node, slot)
                self.stays.let_go(holding, slot)
                if holding.state is DRAINING and self._is_drained(node, slot):
                    freed += self.detach(node, slot)
            node = parent
        return freed

    def move_lock_down(self, node: Node, slot: int) -> None:
        """Lock a node's READY holding in the place of its parent's, which has a lock of the
        caller: as `lock` and `unlock`, without a walk."""
        parent, below = node.parent, node.held[slot]
        above = None if parent is None else parent.held[slot]
        assert above is not None
        assert below is not None
        self.uses += 1
        below.locks += 1
        if below.locks == 1:
            self.stays.hold_back(below, slot)
        above.locks -= 1
        if above.locks == 0:
            self.stays.let_go(above, slot)

    def touch(self, tail: Node) -> None:
        """Everything on the path was used."""
        self.uses += 1
        self.standing.touch(tail, self.uses)

    def _is_drained(self, node: Node, slot: int) -> bool:
        holding = node.held[slot]
        if holding is None or holding.state is not DRAINING or holding.locks:
            return False
        return slot != DEVICE or node.device_below == 0
