"""What is fetched to the host, and for whom: the records of quire.manager.fetches.

Prefetch   one request's wish for what the store has of its prefix
Intake     pages of one prefix on their way, from the store or a peer, until they are in the
           tree. Of the store: whoever wants these pages shares one; of a peer: one lease's

QUEUED ──flush──▶ PROBING ──hit──▶ WAITING ──its turn──▶ FETCHING ──ended, or settled──▶ DONE
   │                  ├─only asked─▶ PROBED ─fetch─▶ WAITING ◀──more to bring──┘          │
   └───────declined───┴──miss, declined───────────────────────────────────────────────────┘
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.components import Component
from quire.keys import PrefixKey
from quire.manager.counters import Decline
from quire.manager.lease import Lease
from quire.messages import PeerSource
from quire.types import OperationId, PageIds, PageStatus

GRACE_S = 5.0
"""How much longer than the worker the manager waits before it goes on without it."""


class PrefetchState(enum.Enum):
    QUEUED = enum.auto()
    PROBING = enum.auto()
    PROBED = enum.auto()
    """The hit length is known, and nobody has asked for the pages yet."""
    WAITING = enum.auto()
    """In the line for the budget, in order of arrival."""
    FETCHING = enum.auto()
    """On their way: by a fetch of its own, or one that it shares."""
    DONE = enum.auto()


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's prefetch. `key` is the whole prefix wanted; pages before `first` are there."""

    lease: Lease
    key: PrefixKey
    first: int
    started_s: float
    wants_fetch: bool
    """False: only the hit length is wanted, for now."""
    state: PrefetchState = PrefetchState.QUEUED
    declined: Decline | None = None
    num_asked: int = 0
    """Pages that the store was asked about so far, and has."""
    num_hit: int = 0
    """Pages the store was found to have, up to a point."""
    num_fetching: int = 0
    """Pages really reserved and asked for, for it or for somebody with whom it shares."""
    num_landed: int = 0
    is_cut: bool = False
    """The host has no room, or fetches have no budget, for all that the store has."""
    intake: Intake | None = None
    present: list[bytearray] = field(default_factory=list)
    """Per component but the first: which of the pages asked about the store has (1)."""


@dataclass(slots=True)
class Offer:
    """A run of pages that a peer has."""

    component: int
    first: int
    last: int
    source: PeerSource


@dataclass(slots=True)
class Piece:
    """Pages of one component that an operation brings, from page `first` of the prefix on."""

    component: int
    first: int
    hosts: list[int]
    """Host pages; NO_SLOT where it was taken out already."""
    keys: bytes


@dataclass(slots=True, eq=False)
class Intake:
    key: PrefixKey
    first: int
    """Pages before it are in the tree."""
    last: int
    """End of the prefix that is wanted."""
    timeout_s: float
    """Without progress for so long, a read is given up."""
    epoch: int
    """Of the store that has them; 0: they come from a peer."""
    known: list[bytearray]
    """Per component, by page. From a peer, 1: here, on its way, or in the line. From the store,
    1: it has it, as far as is known."""
    lease: Lease | None = None
    """Of a peer: whose pages they are."""
    stream: Stream | None = None
    """Of the store: the stream that it is a part of; nobody shares it then."""
    wanted_by: list[Prefetch] = field(default_factory=list)
    """Of the store: who waits for it."""
    here: list[dict[int, int]] = field(init=False)
    """Per component: page of the prefix → host page, arrived and not in the tree yet."""
    num_wanted: int = field(init=False)
    """Full pages that it was to bring."""
    offers: deque[Offer] = field(default_factory=deque)
    """In the line for budget and room."""
    coming: dict[OperationId, list[Piece]] = field(default_factory=dict)
    failed: list[tuple[int, PageStatus]] = field(default_factory=list)
    """Pages that did not come, of any component, and why; whoever reads them clears them."""
    num_received: int = 0
    """Pages that have come, of all components."""
    num_coming: int = 0
    """Full pages on their way."""
    num_landed: int = 0
    is_cut: bool = False
    """The host had no room for more."""
    hindered: bool = False
    """Of a peer: what is here waits for copies of the same pages that are on their way to the host
    from the own device."""
    shares: bool = False
    """Of a peer: another intake brings what it needs next."""
    closed: bool = False

    def __post_init__(self) -> None:
        self.here = [{} for _ in self.known]
        self.num_wanted = self.last - self.first

    @property
    def complete(self) -> bool:
        """Of a peer: is everything up to `last` in the tree?"""
        assert self.lease is not None
        return self.lease.tail.end >= self.last

    @property
    def idle(self) -> bool:
        """Nothing is on its way or waiting to be."""
        return not (self.offers or self.coming)

    @property
    def leases(self) -> list[Lease]:
        """Who wants what it brings."""
        return [self.lease] if self.lease is not None else [p.lease for p in self.wanted_by]


@dataclass(slots=True, eq=False)
class Stream:
    """Pages [first, last) of a lease's prefix, from the store to the device through the host."""

    lease: Lease
    first: int
    last: int
    """A point."""
    epoch: int
    """Of the store that has them."""
    device: list[PageIds]
    """Per component: where they go, for its span of [first, last)."""
    next: int
    """Full page to be asked for next."""
    end: int
    """Full pages before it have come, or are on their way, as far as is known."""
    needs_state: bool
    """That of the other components is still to be asked for."""
    intake: Intake | None = None
    """What is being fetched."""
    lets_go: bool = False
    """Leases were told to let go of host copies of what the device has by now."""
    num_loads: int = 0
    moved_s: float = 0.0
    """When a part of it was last asked for: it does not wait for room for ever."""
    ended: bool = False
    """No more is asked for."""
    closed: bool = False
    """Its lease has no more to do with it."""


def point_before(
    components: Sequence[Component], present: Sequence[bytes | bytearray], first: int, limit: int
) -> int:
    """Deepest point in [first, limit] all of whose state but full pages is `present`: per
    component but the first, and from page `first` on, 1 for what is there."""
    while True:
        agreed = limit
        for component, mine in zip(components[1:], present, strict=True):
            agreed = component.reachable(bytes(mine), first, agreed)
        if agreed == limit:
            return agreed
        limit = agreed
