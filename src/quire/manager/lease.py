"""PrefixMatch and Lease: what a request found, and the handle through which it uses it.

The pages of a request, in the order of its tokens:

    page    0 ················ d ················ t ·················
            [  in the tree,  )[  in the tree,  )
            [  on the device )[  on the host   )
                              [  private pages of the request, computed by it ···
            ╰─ num_device ───╯╰─ num_host ─────╯

`pages` is the request's page table: tree pages [0, d), then its private ones. Loading moves d
towards t; committing moves private pages into the tree and d with them. Tree pages stay where
they are until release; private pages belong to the lease alone.
"""

from __future__ import annotations

import enum
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from quire.components import Guard
from quire.errors import LeaseError
from quire.keys import PrefixKey
from quire.tree import Node, Tenant, Walk
from quire.types import NO_PAGES, OperationId, PageIds, RequestId, num_pages

if TYPE_CHECKING:
    from quire.manager.fetches import Intake, Meeting, Prefetch, Stream
    from quire.manager.manager import CacheManager
    from quire.manager.states import LeaseState


class PrefixMatch(NamedTuple):
    """How much of a key is usable, in pages. A pure reading: true when taken, protects nothing."""

    key: PrefixKey
    num_device: int
    """Leading pages on the device."""
    num_host: int
    """Pages after those that are on the host."""
    walk: Walk
    change: int
    """State of the tree it was read from."""

    @property
    def num_pages(self) -> int:
        return self.num_device + self.num_host


class Wish(NamedTuple):
    """What a request asks to be done with the pages of its prompt, from the front on."""

    retain_s: float = 0.0
    """Since it ended."""
    level: int = 0
    """GO_FIRST, ordinary, or up to MAX_LEVEL."""
    num_pages: int | None = None
    """Up to that one; None: up to the last that is full when it ends."""
    tiers: tuple[bool, bool] = (True, True)
    """Whether on the device, and on the host."""
    stored: bool = True
    """May the store have what it computes?"""
    then: Wish | None = None
    """Of the pages behind those."""

    def ranges(self, last: int) -> list[tuple[int, int, Wish]]:
        """(first, last, wish), the last range first, up to page `last`."""
        found: list[tuple[int, int, Wish]] = []
        at, wish = 0, self
        while at < last:
            end = last if wish.num_pages is None else min(wish.num_pages, last)
            if end > at:
                found.insert(0, (at, end, wish))
                at = end
            if wish.then is None:
                break
            wish = wish.then
        return found

    @property
    def num_stored(self) -> int | None:
        """The store may have so many of the first pages; None: all. What lies behind one that it
        may not have would be of no use there."""
        at, wish = 0, self
        while wish.stored:
            if wish.then is None:
                return None
            at, wish = wish.num_pages or at, wish.then
        return at


class LoadState(enum.Enum):
    IDLE = enum.auto()
    """Nothing is on its way: every tree page of the lease is on the device and readable."""
    LOADING = enum.auto()
    """Pages are arriving layer by layer; the worker's wait_layer() says when each is there."""
    FAILED = enum.auto()
    """Pages will not arrive: release the lease and start over from a new match."""


class Lease(msgspec.Struct, eq=False):
    manager: CacheManager
    owner: RequestId
    key: PrefixKey
    priority: int
    tail: Node
    """End of the path it protects."""
    device_tail: Node
    """End of the device part of that path."""
    guards: list[Guard]
    tree_pages: PageIds
    """Device pages of the tree it uses, from page 0 on."""
    private_pages: PageIds = NO_PAGES
    loads: set[OperationId] = msgspec.field(default_factory=set)
    """Loads in flight that fill some of `tree_pages`."""
    load_state: LoadState = LoadState.IDLE
    prefetch: Prefetch | None = None
    intake: Intake | None = None
    """What comes from a peer."""
    stream: Stream | None = None
    """What comes through the host in parts; while it does, nothing can be computed."""
    meeting: Meeting | None = None
    """What comes from the back while the front is computed: until it is over the private pages end
    where that begins."""
    state: LeaseState | None = None
    """Windows and recurrent state, for models that have such."""
    yielded: bool = False
    """It waits, and has let go of the device: what the host has is all that it protects."""
    wish: Wish | None = None
    """What is to be done with its pages."""
    tenant: Tenant | None = None
    """Whose quota its pages count for; None: quotas are not kept."""
    looked: int = 0
    """How often the tree had changed when it was acquired."""
    released: bool = False

    def __post_init__(self) -> None:
        self.tail.named += 1
        self.device_tail.named += 1

    def keep(self, pages: PageIds) -> None:
        """Its private pages are these now."""
        if self.tenant is not None:
            self.tenant.num_private += num_pages(pages) - num_pages(self.private_pages)
        self.private_pages = pages

    def end_at(self, tail: Node, device_tail: Node) -> None:
        """Its path ends there now, and the device part of it."""
        self.tail.named -= 1
        self.device_tail.named -= 1
        tail.named += 1
        device_tail.named += 1
        self.tail, self.device_tail = tail, device_tail

    @property
    def num_device(self) -> int:
        return num_pages(self.tree_pages)

    @property
    def num_host(self) -> int:
        """Pages on the host that a load would bring to the device."""
        return max(0, self.tail.end - self.num_device)

    @property
    def pages(self) -> PageIds:
        """The request's page table."""
        return PageIds(self.tree_pages + self.private_pages)

    def end(self) -> None:
        """It was released: it names no node any more."""
        self.released = True
        self.tail.named -= 1
        self.device_tail.named -= 1

    def require_live(self) -> None:
        if self.released:
            raise LeaseError(f"the lease of {self.owner!r} was released already")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.released:
            self.manager.release(self)
