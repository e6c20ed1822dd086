"""What the leader tells workers and what workers report: typed, msgpack, nothing else.

A command goes to every rank unchanged: pools have the same page numbers everywhere, only the
bytes behind them differ (each rank holds its shard of the heads). Each rank answers each command
with completions carrying the operation's id, its rank and a status per page. "Done" is not "ok":
the statuses say what happened, page by page.

    Backup, Load     one `Transferred(final=True)`
    Serve            nothing until it is cancelled; then, when nobody reads its pages any more,
                     one `Transferred(final=True)`
    Write, Fetch     any number of `Transferred`, the last with final=True; `first` is the index
                     within the command of the first status carried
    Probe            one `Probed`
    *Store           one `StoreChanged`
    Touch, Disown    nothing
    Cancel           nothing of its own: the cancelled operation still ends with its final report,
                     and only then may its pages be reused
"""

from __future__ import annotations

import msgspec

from quire.keys import chain_keys
from quire.types import PAGE_KEY_BYTES, OperationId, Owner, PageIds, PageKey, split_keys


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


# ---- commands: leader → worker ------------------------------------------------------------------


class Backup(_Message, frozen=True, tag="backup"):
    """L1 → L2: copy device[i] to host[i]."""

    op: OperationId
    component: str
    device: PageIds
    host: PageIds


class Load(_Message, frozen=True, tag="load"):
    """L2 → L1: copy host[i] to device[i], layer by layer."""

    op: OperationId
    component: str
    host: PageIds
    device: PageIds


class Run(msgspec.Struct, frozen=True):
    """Pages of a write that follow each other on one path, and how to name them."""

    parent: bytes = b""
    """Key of the page before the first, NO_PARENT for the first of a namespace: a page whose parent
    the store lacks is not written (ORPHAN). Empty: pages that need no other."""
    keys: bytes = b""
    """Empty: nobody has needed them yet. They are computed where the pages are written, which takes
    longer than all else that the leader does for a new page, and come back with the report."""
    seed: bytes = b""
    tokens: bytes = b""
    page_bytes: int = 0
    page_width: int = 0
    """For chain_keys()."""
    owner: Owner | None = None
    """Whose quota they count for."""

    @property
    def num_pages(self) -> int:
        if self.keys:
            return len(self.keys) // PAGE_KEY_BYTES
        return (len(self.tokens) - self.page_width) // self.page_bytes + 1

    @property
    def makes_sense(self) -> bool:
        sizes = bool(self.keys) or 0 < self.page_bytes <= self.page_width <= len(self.tokens)
        lengths = len(self.keys) % PAGE_KEY_BYTES == 0, len(self.parent) in (0, PAGE_KEY_BYTES)
        whose = self.owner is None or (self.owner.name.isalnum() and 0 < self.owner.share <= 1)
        return sizes and all(lengths) and whose

    def page_keys(self) -> bytes:
        if self.keys:
            return self.keys
        return chain_keys(self.seed, self.tokens, self.page_bytes, self.page_width)


class Write(_Message, frozen=True, tag="write"):
    """L2 → L3: publish host[i] as page i of the runs; a page behind the page that it needs."""

    op: OperationId
    component: str
    host: PageIds
    runs: list[Run]
    timeout_s: float

    @property
    def has_keys(self) -> bool:
        return all(run.keys for run in self.runs)

    def keys_and_parents(self) -> tuple[list[PageKey], list[PageKey]]:
        """Of every page its own key and that of the page before; no parents if none is needed."""
        keys, parents = b"", b""
        for run in self.runs:
            mine = run.page_keys()
            keys += mine
            if run.parent:
                parents += run.parent + mine[:-PAGE_KEY_BYTES]
        return split_keys(keys), split_keys(parents)

    def owners(self) -> list[Owner | None]:
        """Of every page; none at all if nobody has a quota."""
        if not any(run.owner for run in self.runs):
            return []
        return [owner for run in self.runs for owner in [run.owner] * run.num_pages]


class PeerPart(msgspec.Struct, frozen=True):
    """One rank of a peer: where its page server listens, and which KV heads it holds."""

    address: str
    """As `tcp://host:port`; the scheme names the transport."""
    first_head: int
    last_head: int
    """[first, last) of the model's heads; a component without heads has one."""


class PeerSource(msgspec.Struct, frozen=True):
    """Where at a peer the pages of a fetch are: index `first` of a grant, and those after it."""

    epoch: str
    """The peer's life: it changes when it is started again, and what it granted is gone then."""
    grant: int
    """Its operation (`Serve`) that lets others read."""
    first: int
    parts: list[PeerPart]
    ticket: bytes = b""
    """What the peer gave with the grant, and wants to see again."""


class Fetch(_Message, frozen=True, tag="fetch"):
    """L3 or peer → L2: read keys[i] into host[i], in order; pages after the first miss may be
    skipped when they come from the store."""

    op: OperationId
    component: str
    keys: bytes
    host: PageIds
    timeout_s: float
    source: PeerSource | None = None
    """None: the store attached."""
    after: OperationId | None = None
    """Its pages are of no use before those of this one, which come first."""


class Serve(_Message, frozen=True, tag="serve"):
    """L2 → peer: let peers read host[i], by the number of the operation and by i, until it is
    cancelled."""

    op: OperationId
    component: str
    host: PageIds


class Probe(_Message, frozen=True, tag="probe"):
    """What of each query's keys does L3 hold? One command for many requests."""

    op: OperationId
    component: str
    queries: list[bytes]
    timeout_s: float
    each: bool = False
    """False: only how many leading ones. True: each of them, for state that needs no prefix."""


class Touch(_Message, frozen=True, tag="touch"):
    """These pages were used in other tiers: L3 should not give them up first. One whole path, from
    the first page of its namespace on."""

    component: str
    keys: bytes
    each: bool = False
    """True: state that needs no prefix; a missing page does not end the path."""


class Disown(_Message, frozen=True, tag="disown"):
    """These pages are wrong, whatever their checksums say: L3 gives them out no more."""

    component: str
    keys: bytes


class Cancel(_Message, frozen=True, tag="cancel"):
    op: OperationId


class AttachStore(_Message, frozen=True, tag="attach"):
    """Open the store at `url` and use it from here on; replaces the one attached."""

    op: OperationId
    url: str


class DetachStore(_Message, frozen=True, tag="detach"):
    op: OperationId


class ClearStore(_Message, frozen=True, tag="clear"):
    op: OperationId


Command = (
    Backup
    | Load
    | Write
    | Fetch
    | Serve
    | Probe
    | Touch
    | Disown
    | Cancel
    | AttachStore
    | DetachStore
    | ClearStore
)

# ---- completions: worker → leader ---------------------------------------------------------------


class Transferred(_Message, frozen=True, tag="transferred"):
    """Pages [first, first + len(statuses)) of `op` have these statuses (one byte each)."""

    op: OperationId
    rank: int
    component: str
    first: int
    statuses: bytes
    final: bool
    seconds: float = 0.0
    """Time the bytes of this report took to move; 0 when unknown."""
    keys: bytes = b""
    """With the final report of a write: the keys of its pages, if it had to compute them."""
    at_s: float | None = None
    """When it was made, on the machine's monotonic clock; None: when it is read."""


class Probed(_Message, frozen=True, tag="probed"):
    """What is there, per query, in the form that was asked for."""

    op: OperationId
    rank: int
    component: str
    hits: list[int] = []
    """Leading pages."""
    present: list[bytes] = []
    """With `each`: one byte per key, 1 where it is there."""
    paces: list[float] = []
    """How long a leading page takes beside one of those that were read lately; none: as long."""


class StoreChanged(_Message, frozen=True, tag="store_changed"):
    op: OperationId
    rank: int
    error: str = ""
    """Empty when it worked, else one sentence for the person who asked."""


class WorkerLost(_Message, frozen=True, tag="worker_lost"):
    """The rank is gone: its operations will never be reported on again."""

    rank: int
    reason: str


Completion = Transferred | Probed | StoreChanged | WorkerLost

_encoder = msgspec.msgpack.Encoder()


def encode(messages: list[Command] | list[Completion]) -> bytes:
    return _encoder.encode(messages)
