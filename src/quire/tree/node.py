"""Nodes and holdings: the records the tree is made of. No behaviour of its own.

A node is a run of pages; its path from the root spells a prefix. For each component and each tier
it may have a `Holding`: the pool pages, their residency state and how many users protect them.
"""

from __future__ import annotations

import msgspec

from quire.eviction import EvictionQueue, Retention
from quire.keys import PrefixKey
from quire.types import PageIds, Residency, Tier

NUM_TIERS = len(Tier)


def slot_of(component: int, tier: int) -> int:
    """Index of (component, tier) in Node.held."""
    return component * NUM_TIERS + tier


class Holding:
    """What one tier holds of one component of one node. Absent ones have no Holding at all."""

    __slots__ = (
        "_next",
        "_prev",
        "forgiven",
        "locks",
        "node",
        "owes",
        "pages",
        "queue",
        "reasons",
        "state",
    )

    def __init__(self, node: Node, pages: PageIds, state: Residency) -> None:
        self.node = node
        self.pages = pages
        self.state = state
        self.locks = 0
        self.reasons = 0
        """Why it must stay: somebody locks it, its bytes are not READY, it owes the host a copy,
        and one for each child that must stay in the same tier. 0: it may go, once it is a leaf."""
        self.owes = False
        """Device only: pages on the host would be of no use without it, and the host has no copy
        of it. It stays until the host has one."""
        self.forgiven = False
        """The host cannot take that copy: it may go all the same."""
        self.queue: EvictionQueue | None = None
        """The eviction queue it stands in; None while FILLING, DRAINING or parked."""
        self._prev: Holding | EvictionQueue | None = None
        self._next: Holding | EvictionQueue | None = None


class Node:
    __slots__ = (
        "children",
        "device_below",
        "end",
        "given_up",
        "held",
        "hits",
        "host_below",
        "is_mark",
        "last_use",
        "name",
        "named",
        "others_stored",
        "page_keys",
        "parent",
        "priority",
        "retention",
        "stamp",
        "start",
        "stored",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, name: int, tokens: bytes | bytearray, end: int, num_slots: int
    ) -> None:
        self.parent = parent
        self.name = name
        """Hash of its first page's tokens: where it is among its parent's children."""
        self.tokens = tokens
        """Tokens of its pages, overlap included. A bytearray once it has grown in place, so that a
        page more does not cost as much as all before it."""
        self.end: int = end
        """Pages from the root to its end."""
        self.start: int = 0 if parent is None else parent.end
        self.children: dict[int, Node] | None = None
        """By name. A name only leads to a candidate: the tokens themselves are compared."""
        self.held: list[Holding | None] = [None] * num_slots
        self.device_below = 0
        """Children whose full pages the device holds."""
        self.host_below = 0
        """Children whose full pages the host holds."""
        self.given_up = 0
        """Pages that went from the host so that the copy of its own need not stay there."""
        self.named = 0
        """Leases and queues of work that know it as the end of something: it stays as it is."""
        self.hits = 0
        self.last_use = 0
        """Number of the use of a path, counted over the tree, that passed it last."""
        self.is_mark = False
        """Somebody will want to go on from its end: state behind it is kept."""
        self.priority = 0
        self.retention: Retention | None = None
        """What somebody asked to be done with it. It neither grows nor is joined then."""
        self.stamp = 0.0
        """For policies that need a time."""
        self.page_keys: bytes | None = None
        self.stored = 0
        """Epoch of the store known to hold its full pages; 0: not known to."""
        self.others_stored: dict[int, int] | None = None
        """The same for other components. Apart, since most nodes have none."""

    @property
    def num_pages(self) -> int:
        return self.end - self.start

    def stored_in(self, component: int) -> int:
        """Epoch of the store known to hold its pages of a component."""
        if component == 0:
            return self.stored
        return 0 if self.others_stored is None else self.others_stored.get(component, 0)

    def set_stored(self, component: int, epoch: int) -> None:
        if component == 0:
            self.stored = epoch
        else:
            self.others_stored = (self.others_stored or {}) | {component: epoch}

    def __repr__(self) -> str:
        tiers = [f"{s}:{h.state.name}" for s, h in enumerate(self.held) if h is not None]
        return f"Node({self.start}..{self.end} {' '.join(tiers)})"


class Tenant:
    """Who has the namespaces of one name: all that they hold together is what a quota is of."""

    __slots__ = ("name", "num_held", "num_private", "roots")

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        """Empty: of those without a salt, whom no quota holds."""
        self.num_held = [0] * num_slots
        """Pages in the tree by slot, where quotas are kept."""
        self.num_private = 0
        """Full device pages that its requests have beside those, where quotas are kept."""
        self.roots: dict[Root, None] = {}


class Root(Node):
    """Top of one namespace's tree: no pages of its own."""

    __slots__ = ("digest", "page_bytes", "page_width", "tenant", "users")

    def __init__(self, key: PrefixKey, tenant: Tenant, num_slots: int) -> None:
        super().__init__(None, 0, b"", 0, num_slots)
        self.digest = key.namespace.digest
        self.page_bytes = key.page_bytes
        self.page_width = key.page_width
        self.users = 0
        """Leases below; an empty root without users is dropped."""
        self.tenant = tenant


class Walk(msgspec.Struct, frozen=True):
    """Nodes along a key, and how many of its pages they cover; the last may be covered partly."""

    nodes: list[Node]
    num_pages: int


class Inserted(msgspec.Struct, frozen=True):
    tail: Node
    """Last node on the path that carries the pages; `tail.end` says how far that is."""
    pages: PageIds
    """Pages of the tree for [first, tail.end): the caller's where adopted, else its twins."""
    duplicate: PageIds
    """The caller's pages that the tree had already: to be freed by the caller."""
    adopted: list[Node]
    """Nodes that took the caller's pages."""


class Freed(msgspec.Struct, frozen=True):
    """Pages that left the tree and belong to the caller now."""

    slot: int
    pages: PageIds
    node: Node
    was_ready: bool
    was_last: bool
    """The node holds that component nowhere else."""


def held_pages(node: Node, slot: int) -> PageIds:
    """What a node has in a slot where it has something."""
    holding = node.held[slot]
    assert holding is not None
    return holding.pages
