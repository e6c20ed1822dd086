"""What is fetched to the host, and for whom: the records of quire.manager.fetches.

Prefetch   one request's wish for what the store has of its prefix
Intake     pages of one prefix on their way to the host. Of the store: whoever wants these pages
           shares one; of a peer: one lease's; of a stream: the part that is under way
Stream     what the store has of a prefix and the host cannot hold at once
Meeting    what comes from the back of a prefix while its request computes from the front

PROBING ──hit──▶ WAITING ──its turn──▶ FETCHING ──ended, or settled──▶ DONE
   ├─only asked─▶ PROBED ─fetch─▶ WAITING ◀──more to bring──┘           │
   └──miss, declined────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.components import Component
from quire.keys import PrefixKey
from quire.manager.costs import Way
from quire.manager.counters import Decline
from quire.manager.lease import Lease
from quire.manager.operations import COPY_TIMEOUT_S
from quire.messages import PeerSource
from quire.tree import Holding
from quire.types import OperationId, PageIds, PageStatus

GRACE_S = 5.0
"""How much longer than the worker the manager waits before it goes on without it."""

PageRange = tuple[int, int, int]
"""Pages [first, last) of a component: (component, first, last)."""


class PrefetchState(enum.Enum):
    PROBING = enum.auto()
    PROBED = enum.auto()
    """The hit length is known, and nobody has asked for the pages yet."""
    WAITING = enum.auto()
    """In the line for the budget, in order of arrival."""
    FETCHING = enum.auto()
    """On their way: by a fetch of its own, or one that it shares."""
    DONE = enum.auto()


# By a plain name, as in quire.types: every request looks at these.
PROBING, PROBED, DONE = PrefetchState.PROBING, PrefetchState.PROBED, PrefetchState.DONE
_BOTH = Way.BOTH


class Prefetch(msgspec.Struct, eq=False):
    """One request's prefetch. `key` is the whole prefix wanted; pages before `first` are there."""

    lease: Lease
    key: PrefixKey
    first: int
    started_s: float
    wants_fetch: bool
    """False: only the hit length is wanted, for now."""
    can_meet: bool = False
    """The request can compute while pages come."""
    known: list[bytearray] = []
    """Per component, by page, as far as the store was asked: 1 where it has it. Of full pages it
    is `num_asked` that says so."""
    state: PrefetchState = PrefetchState.PROBING
    declined: Decline | None = None
    num_asked: int = 0
    """Pages that the store was asked about so far, and has."""
    pace: float = 1.0
    """How long one of those takes beside one of those fetched lately: of several stores some are
    slower."""
    num_hit: int = 0
    """Pages the store was found to have, up to a point."""
    num_fetching: int = 0
    """Pages really reserved and asked for, for it or for somebody with whom it shares."""
    num_landed: int = 0
    timeout_at_s: float = math.inf
    """When the policy stops waiting for it, if it is time that decides."""
    is_cut: bool = False
    """The host has no room, or fetches have no budget, for all that the store has."""
    intake: Intake | None = None
    way: Way = Way.FETCH
    """How the request is to come by the pages, once they were found."""

    @property
    def is_settled(self) -> bool:
        """Need its request wait no longer, whatever the policy?"""
        return self.state is DONE or self.state is PROBED or self.way is _BOTH


@dataclass(slots=True)
class OfferedPages:
    """Pages [first, last) of a component that a peer has."""

    component: int
    first: int
    last: int
    source: PeerSource
    """Where page `origin` is, and those after it."""
    origin: int


@dataclass(slots=True)
class FetchPiece:
    """Pages [first, last) of one component that an operation brings."""

    component: int
    first: int
    last: int
    hosts: dict[int, int]
    """Page of the prefix → host page, of those that are still to come."""


@dataclass(slots=True, eq=False)
class Intake:
    key: PrefixKey
    first: int
    """Pages before it are in the tree, or, of a stream, on the host."""
    last: int
    """End of what is wanted."""
    timeout_s: float
    """Without progress for so long, a read is given up."""
    known: list[bytearray]
    """Per component, by page. From a peer, 1: here, on its way, or in the line. From the store,
    1: it has it, as far as is known."""
    epoch: int = 0
    """Of the store that has them; 0: they come from a peer."""
    on_end: Callable[[Intake], None] | None = None
    """Of the store: told when what was sent has come, or not, or is overdue."""
    lease: Lease | None = None
    """Of a peer: whose pages they are."""
    is_part: bool = False
    """Of a stream or a meeting: nobody shares it."""
    after: OperationId | None = None
    """Of a meeting: what comes first."""
    wanted_by: list[Prefetch] = field(default_factory=list)
    """Of the store: who waits for it."""
    here: list[dict[int, int]] = field(init=False)
    """Per component: page of the prefix → host page, arrived and not in the tree yet."""
    offers: deque[OfferedPages] = field(default_factory=deque)
    """In the line for budget and room."""
    coming: dict[OperationId, list[FetchPiece]] = field(default_factory=dict)
    failed: list[tuple[int, PageStatus]] = field(default_factory=list)
    """Pages that did not come, of any component, and why; whoever reads them clears them."""
    num_received: int = 0
    """Pages that have come, of all components."""
    is_cut: bool = False
    """The host had no room for more."""
    hindered_by: Holding | None = None
    """Of a peer: what is here waits for this copy of the same pages, which is on its way to the
    host from the own device."""
    hindered_s: float = 0.0
    """Since when."""
    shares: bool = False
    """Of a peer: another intake brings what it needs next."""
    stopped: bool = False
    """No more is wanted."""

    def __post_init__(self) -> None:
        self.here = [{} for _ in self.known]

    @property
    def idle(self) -> bool:
        """Nothing is on its way or waiting to be."""
        return not (self.offers or self.coming)

    def is_hindered(self, now: float) -> bool:
        """Does it wait for a copy that has not had its time yet?"""
        return self.hindered_by is not None and now - self.hindered_s <= COPY_TIMEOUT_S

    @property
    def num_coming(self) -> int:
        """Full pages on their way."""
        pieces = [piece for pieces in self.coming.values() for piece in pieces]
        return sum(len(piece.hosts) for piece in pieces if piece.component == 0)

    def run_here(self, component: int, first: int, last: int) -> int:
        """Page up to which those from `first` on, `last` at most, are here without a gap."""
        at = first
        while at < last and at in self.here[component]:
            at += 1
        return at


@dataclass(slots=True, eq=False)
class Stream:
    """Pages [first, last) of a lease's prefix, from the store to the device through the host.

        first ······· next ············ end ······ last
        [ asked for  )[ to be asked for )[ not to be had )

    No more is asked for when `next` has come to `end`.
    """

    lease: Lease
    first: int
    last: int
    """A point."""
    epoch: int
    """Of the store that has them."""
    device: list[PageIds]
    """Per component: where they go, for its span of [first, last)."""
    next: int
    end: int
    moved_s: float
    """When a part of it was last asked for: it does not wait for room for ever."""
    intake: Intake | None = None
    """The part that is being fetched."""
    loading: dict[OperationId, Intake] = field(default_factory=dict)
    """Parts that are copied to the device."""
    lets_go: bool = False
    """Leases were told to let go of host copies of what the device has by now."""

    @property
    def closed(self) -> bool:
        """Its lease has no more to do with it."""
        return self.lease.stream is not self


class PartState(enum.Enum):
    """FETCHING ──▶ HERE ──all behind it are on their way to the device──▶ LOADING ──▶ LOADED"""

    FETCHING = enum.auto()
    HERE = enum.auto()
    """On the host."""
    LOADING = enum.auto()
    LOADED = enum.auto()


@dataclass(slots=True, eq=False)
class MeetingPart:
    """Pages [first, last) of a meeting."""

    first: int
    last: int
    intake: Intake
    state: PartState = PartState.FETCHING


@dataclass(slots=True, eq=False)
class Meeting:
    """Pages of a lease's prefix, computed from the front and fetched from the back.

        num_device ······ at ········ low ··············· high ····
        [ computed, or under way )[ free )[ parts, front first )[ to be computed later )
        [ private pages of the lease     )[ `back` ···

    `low` falls with every part that is asked for, and rises again with those that the request
    overtakes; it never lies before `at`. They have met when `at` is `low` and all parts are LOADED.
    """

    lease: Lease
    key: PrefixKey
    """Of all of it: the lease's own is that of what it has shared."""
    epoch: int
    """Of the store that has them."""
    part_pages: int
    at: int
    """Pages before it were given to the model."""
    low: int
    high: int
    back: PageIds
    """All device pages of the lease from page `low` on: nothing is computed into these."""
    begun_s: float
    reckoned_s: float | None
    """How long it should take; None: nobody knows."""
    pace: float
    """As the prefetch's: of the store that has them, where there are several."""
    parts: list[MeetingPart] = field(default_factory=list)
    loading: dict[OperationId, MeetingPart] = field(default_factory=dict)
    asks: bool = True
    """False: no more is asked for."""
    waits_until_s: float | None = None
    """The request has come to parts that should have come by now: until then it waits."""
    is_patient: bool = True
    """False: it has waited in vain, and does not do so again."""

    @property
    def closed(self) -> bool:
        """Its lease has no more to do with it."""
        return self.lease.meeting is not self

    @property
    def num_coming(self) -> int:
        """Parts that are on their way to the host."""
        return sum(part.state is PartState.FETCHING for part in self.parts)

    @property
    def num_coming_pages(self) -> int:
        coming = PartState.FETCHING
        return sum(part.last - part.first for part in self.parts if part.state is coming)

    @property
    def late(self) -> list[MeetingPart]:
        """Those in front that are not on their way to the device: whoever comes to them waits for
        them, or computes them."""
        on_its_way = (PartState.LOADING, PartState.LOADED)
        ends = (i for i, part in enumerate(self.parts) if part.state in on_its_way)
        return self.parts[: next(ends, len(self.parts))]


def point_before(
    components: Sequence[Component], known: Sequence[bytes | bytearray], first: int, limit: int
) -> int:
    """Deepest point in [first, limit] all of whose state is `known` to be there, per component and
    by page. Full pages are: they are not looked at."""
    while True:
        agreed = limit
        for component, mine in zip(components[1:], known[1:], strict=True):
            agreed = component.reachable(bytes(mine[first:]), first, agreed)
        if agreed == limit:
            return agreed
        limit = agreed
