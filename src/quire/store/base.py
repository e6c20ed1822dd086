"""The L3 protocol: what a store implements, and the value types that travel through it.

A `Store` keeps *objects*: a fixed-size header followed by a page's bytes, under a name. It knows
nothing of models or checksums, and of prefixes only which object needs which. `PageStore`
(client.py) sits on every store, seals what goes in and verifies what comes out, so that no backend
has to be trusted with rule 1, and so that a `FaultyStore` placed between the two is seen through.

Calls are batched and block; they are made from a worker's I/O threads, never from the step, and
several threads call at once. Faults come back per object, never as an exception of the batch: a
store that does raise is treated as having failed every object of that call, or, if it is a
TimeoutError, as not having answered.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from quire.store.account import StoreBudget, StoreHealth
from quire.types import Owner, PageKey, PageStatus

HEADER_BYTES = 4096
"""One disk block, so that the page behind it stays aligned for direct I/O."""

STEP_NS = 1000
"""By which a page counts as used before the page ahead of it: some file systems keep times no
finer."""

SPARE_SHARE = 16
"""Of what an owner may have, what goes at a time when it has all of it."""

MAX_OBJECTS, MAX_BYTES = 16, 16 << 20
"""Of one call that moves objects, at most: enough to keep a disk busy, little enough that the
checksums of one thread fall into the transfers of another."""


class WriteWhen(enum.StrEnum):
    """When a page is written to one of several stores: see tiers.py."""

    THROUGH = "through"
    BACK = "back"
    NEVER = "never"


OBJECT_TEXT = re.compile(r"([0-9a-f]{64})\.([a-z0-9_-]{1,32})\.(\d{1,6})of(\d{1,6})")
"""What ObjectName.text looks like."""


def pages_per_call(page_bytes: int) -> int:
    return max(1, min(MAX_OBJECTS, MAX_BYTES // page_bytes))


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a page an object holds: one component, one shard of its heads."""

    component: str
    shard: int
    num_shards: int
    fingerprint: bytes
    """32-byte digest of model, dtype, page size and layout: whose bytes these are."""
    page_bytes: int
    """Length of every page of this part; a multiple of HEADER_BYTES."""


class ObjectName(NamedTuple):
    """Full identity of one stored object. A tuple, like Blob: one of each is made per page moved,
    and tuples are several times cheaper to make than frozen dataclasses."""

    key: PageKey
    component: str
    shard: int
    num_shards: int

    @property
    def text(self) -> str:
        """File- and URL-safe name: hex key, then component and shard."""
        return f"{self.key.hex()}.{self.component}.{self.shard}of{self.num_shards}"

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """What `text` names; None: somebody else's."""
        match = OBJECT_TEXT.fullmatch(text)
        if match is None:
            return None
        return cls(PageKey(bytes.fromhex(match[1])), match[2], int(match[3]), int(match[4]))


class Blob(NamedTuple):
    """Where an object's bytes are read from or written to, without a copy."""

    header: memoryview
    """HEADER_BYTES long, block-aligned."""
    payload: memoryview
    """The host page itself, block-aligned when it comes from a host pool."""


class Landings(list[Blob]):
    """Where the objects of one get() go. Whoever has filled one may say so at once, on the thread
    that called: bytes that have just come are still in the processor's cache when they are checked.
    """

    def __init__(self, blobs: Iterable[Blob], landed: Callable[[int], None]) -> None:
        """`landed(index)`: this object is whole."""
        super().__init__(blobs)
        self.landed = landed


class NewObject:
    """An object to be published."""

    __slots__ = ("_blob", "name", "owner", "parent", "used_ns")

    def __init__(
        self,
        name: ObjectName,
        blob: Blob | Callable[[], Blob],
        parent: ObjectName | None,
        used_ns: int,
        owner: Owner | None = None,
    ) -> None:
        """`parent`: what it is of no use without; None: it needs nothing. `used_ns`: Unix time, see
        Store.touch. `owner`: whose share of the store's budget it is of; None: nobody's."""
        self.name = name
        self._blob = blob
        self.parent = parent
        self.used_ns = used_ns
        self.owner = owner

    @property
    def blob(self) -> Blob:
        """May be made when it is first asked for: whoever sends one object after the other asks for
        each when it is its turn, and bytes that were just read for their checksum are sent from the
        processor's cache."""
        if callable(self._blob):
            self._blob = self._blob()
        return self._blob

    def with_blob(self, blob: Blob) -> NewObject:
        """The same object of other bytes."""
        return NewObject(self.name, blob, self.parent, self.used_ns, self.owner)

    @property
    def size_bytes(self) -> int:
        return self.blob.header.nbytes + self.blob.payload.nbytes


@dataclass(frozen=True, slots=True)
class StoredObject:
    name: ObjectName
    size_bytes: int
    modified_s: float
    """Unix time of publication or last use, as the store knows it."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds and may hold. None: unknown or unlimited."""

    num_objects: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted_objects: int = 0
    read_only: str = ""
    """Why nothing is written at the moment; empty when writing works."""


class Store(Protocol):
    """One L3 backend. Thread-safe. `deadline` is absolute, on time.monotonic's clock."""

    def contains(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        """Is each object published? May be optimistic: get() decides."""

    def get(
        self, names: Sequence[ObjectName], into: Sequence[Blob], *, deadline: float
    ) -> list[PageStatus]:
        """Read header and payload of each object: OK (exactly those bytes), MISS, FAILED, TIMEOUT.

        At most MAX_OBJECTS, as in put(). `into` may be Landings; nobody has to tell them. An object
        shorter or longer than the blob is CORRUPT; but the bytes of a shorter one are in place, as
        far as they go: it may be a packed page. Of a longer one the header is: it may be another
        model's, or a later version's.
        """

    def put(self, objects: Sequence[NewObject], *, deadline: float) -> list[PageStatus]:
        """Publish each object atomically. OK also if it was there already; REJECTED when full.

        PageStore has asked contains() before: a store need not look again. A parent of the same
        call comes before its child. An object without its parent is ORPHAN and not kept; one with
        it counts as used when it says, and never as used later than its parent.

        A store that has a budget and accounts for owners makes room for who has its share of it
        among what that owner has, and colder than what the object needs; else it is REJECTED. Other
        stores leave owners alone.
        """

    def touch(self, names: Sequence[ObjectName], *, used_ns: int, each: bool = False) -> None:
        """The objects were used, at this Unix time: the least recently used go first when there
        is no room, and no object goes before one that needs it.

        `names` is a run of a path in order, each needing those before it and counting as used
        STEP_NS before the one ahead; what lies behind a missing one does not count, and none
        counts as used later than its parent. With `each` they do not need each other.
        """

    def quarantine(self, name: ObjectName) -> bool:
        """The object failed verification: make it unreadable, keep it for a person if possible.

        False: it is not there any more. Then it was being replaced while it was read.
        """

    def scan(self) -> Iterator[StoredObject]:
        """Every published object, in no particular order. For people and verification."""

    def clear(self, *, wait: bool = False) -> int:
        """Every object this store owns is a miss from here on, for everybody; nothing else is
        touched. Freeing the space may go on in the background unless `wait`. Returns how many
        were removed by then."""

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...


@runtime_checkable
class Counting(Protocol):
    """A store that counts what only it can see; shown beside what its client counts."""

    def counts(self) -> dict[str, int]:
        """By name. Never asks the server."""


@runtime_checkable
class Budgeted(Protocol):
    """A store with a budget of its own."""

    def budget(self) -> StoreBudget:
        """As far as this process knows. Never asks a server."""


@runtime_checkable
class Making(Protocol):
    """A store in which a question costs much, and that finds out when it writes whether an object
    is there."""

    def has_made(self, name: ObjectName) -> bool:
        """Was it written by this process a moment ago, and was not there before? Then what follows
        it is new too, and nobody asks whether it is there."""


class Pages(Protocol):
    """What a worker uses: pages in and out of one store or several, sealed and verified.

    Thread-safe, and never raises for what a store does: see PageStore, which is one of these.
    """

    def find(
        self,
        part: Part,
        queries: Sequence[Sequence[PageKey]],
        *,
        deadline: float,
        each: bool = False,
        uses: bool = True,
    ) -> list[bytes]:
        """Which pages are there, per query, one byte each; none when nobody answers. Those behind a
        missing one do not count as there, unless with `each`. What is found counts as used, since
        it is about to be fetched, unless `uses` is False.

        May be optimistic: get() decides.
        """

    def pace(self, part: Part, keys: Sequence[PageKey]) -> float:
        """How long one of these pages takes, which were just found, beside one of those that were
        read lately: 1 as long, 2 twice. Of several stores some are slower."""

    def touch(
        self,
        part: Part,
        keys: Sequence[PageKey],
        *,
        used_ns: int | None = None,
        each: bool = False,
    ) -> None: ...

    def disown(self, part: Part, keys: Sequence[PageKey]) -> Callable[[], None]:
        """The pages are wrong, although they are whole: from here on they are misses, until they
        are written anew. What is returned takes them out of the store, for as long as it takes."""

    def get(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
    ) -> list[PageStatus]: ...

    def put(
        self,
        part: Part,
        keys: Sequence[PageKey],
        pages: Sequence[memoryview],
        *,
        deadline: float,
        parents: Sequence[PageKey] = (),
        owners: Sequence[Owner | None] = (),
        used_ns: int | None = None,
    ) -> list[PageStatus]: ...

    def clear(self) -> None:
        """Raises OSError, StoreError."""

    def counters(self) -> dict[str, int]:
        """See counters.py. Never asks a server, nor do health()."""

    def health(self) -> list[StoreHealth]:
        """Of one store, or of several, in the order in which they were given."""

    def close(self, timeout_s: float = 5.0) -> None: ...
