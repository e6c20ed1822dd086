"""ForeignDevice: host ↔ device pages that somebody else owns (L2 ↔ an engine's own L1).

For engines that keep their KV cache and its page tables: nothing in the tree is on the device, and
the engine names its pages in each call. A lease then holds a path on the host:

    page    0 ················ n ················ t ·················
            [  the engine has  )
            [  in the tree, on the host          )
                                                 [  saves under way  )
            load_into names pages of [0, t), save_from pages from t on
                                     ╰─ lease.num_host = t

Pages that are saved fill host pages that belong to the save, and enter the tree when they are
there, in the order of their tokens: behind one that failed nothing enters. What is copied stays
where it is until every rank has said that it is done, whatever becomes of the lease; the engine
must keep its own pages for as long. What is still on its way when the lease ends is given up.

    COPYING ──last report──▶ DONE       every page
                     └─────▶ FAILED     `failed`: the engine's pages that were not copied

Knows the tree and the allocators of one component, `full`; neither engines nor bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError, LeaseError
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.fetches.landing import Arrival, land
from quire.manager.lease import Lease
from quire.manager.operations import COPY_TIMEOUT_S, Operation, OperationKind, OpState
from quire.messages import Backup, Load
from quire.tree import Node, held_pages
from quire.types import (
    HOST,
    NO_PAGES,
    PAGE_ID_BYTES,
    READY,
    OperationId,
    PageIds,
    num_pages,
    page_array,
    page_ids,
)


class ForeignState(enum.Enum):
    COPYING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class ForeignCopy:
    """Pages [first, first + n) of a prefix, to or from the engine's pages `device`."""

    op: OperationId
    first: int
    device: PageIds
    state: ForeignState = ForeignState.COPYING
    failed: PageIds = NO_PAGES
    """The engine's pages that were not copied."""


@dataclass(slots=True, eq=False)
class _Save:
    copy: ForeignCopy
    key: PrefixKey
    host: PageIds
    """Its own until they are in the tree."""
    arrived: int = 0
    """Leading pages that are there, once it has ended."""

    @property
    def last(self) -> int:
        return self.copy.first + num_pages(self.copy.device)


class ForeignDevice:
    def __init__(
        self,
        core: Core,
        costs: CostModel,
        advance: Callable[[Lease], None],
        keep: Callable[[Node], None],
    ) -> None:
        """`advance`: extend a lease to what is there now. `keep`: a path is on the host, and the
        store should have it."""
        self._core = core
        self._costs = costs
        self._advance = advance
        self._keep = keep
        self._loads: dict[OperationId, ForeignCopy] = {}
        self._saves: dict[Lease, list[_Save]] = {}
        """Of live leases, in the order of their tokens."""
        self._given_up: dict[OperationId, _Save] = {}
        """Nothing of these enters the tree any more."""

    def load_into(self, lease: Lease, first: int, device_pages: PageIds) -> ForeignCopy:
        """Copy pages [first, first + n) of the lease's prefix, which the host has, to the engine's
        pages."""
        lease.require_live()
        last = first + num_pages(device_pages)
        if not 0 <= first < last <= lease.tail.end:
            raise LeaseError(
                f"{lease.owner!r} loads pages {first} to {last} of the {lease.tail.end} that it has"
            )
        core = self._core
        if not core.healthy:
            return _failed(first, device_pages)
        host = self._host_pages(lease.tail, first, last)
        op = core.operations.start(
            OperationKind.LOAD,
            {self._component: last - first},
            timeout_s=COPY_TIMEOUT_S,
            on_report=self._load_reported,
            guards=core.protect(lease.tail, lease.tail),
        )
        copy = self._loads[op.id] = ForeignCopy(op.id, first, device_pages)
        core.outbox.append(Load(op.id, self._component, host, device_pages))
        return copy

    def save_from(
        self, lease: Lease, key: PrefixKey, first: int, device_pages: PageIds
    ) -> ForeignCopy | None:
        """Copy the engine's pages, which hold pages [first, first + n) of `key`, to the host: those
        that are not there or on their way, as many as it has room for. `key` is the lease's, or
        one that goes on from it. None: nothing is copied."""
        lease.require_live()
        core, last = self._core, min(first + num_pages(device_pages), key.last)
        if not key.continues(lease.key, lease.tail.end):
            raise LeaseError(f"{lease.owner!r} saves another prefix than the one that it holds")
        lease.key = key
        if not self._saves.get(lease):
            self._advance(lease)  # others may have saved it since
        start = self.saved_pages(lease)
        if first > start:
            raise LeaseError(f"{lease.owner!r} saves page {first}, but page {start} comes first")
        if last <= start or not core.healthy or core.config.host_pages == 0:
            return None
        count = min(last - start, core.room(HOST))
        core.counters.backup_skipped_pages += last - start - count
        host = core.reserve(HOST, count, core.tenant(key)) if count else None
        if host is None:
            return None
        at = (start - first) * PAGE_ID_BYTES
        device = PageIds(device_pages[at : at + count * PAGE_ID_BYTES])
        op = core.operations.start(
            OperationKind.BACKUP,
            {self._component: count},
            timeout_s=COPY_TIMEOUT_S,
            on_report=lambda op: self._save_reported(lease, op),
        )
        save = _Save(ForeignCopy(op.id, start, device), key, host)
        self._saves.setdefault(lease, []).append(save)
        core.outbox.append(Backup(op.id, self._component, device, host))
        return save.copy

    def saved_pages(self, lease: Lease) -> int:
        """Pages of its prefix that are on the host, or on their way there: `save_from` goes on
        here."""
        saves = self._saves.get(lease)
        return saves[-1].last if saves else lease.tail.end

    def is_saving(self, lease: Lease) -> bool:
        return bool(self._saves.get(lease))

    def release(self, lease: Lease) -> None:
        """A lease ends: what is on its way to the host is given up."""
        if self._saves:
            self._give_up(self._saves.pop(lease, []))

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Pages that are neither free nor in the tree nor a lease's, for check_invariants()."""
        if slot != HOST:
            return []
        saving = [save.host for saves in self._saves.values() for save in saves]
        return saving + [save.host for save in self._given_up.values()]

    # ---- inside ---------------------------------------------------------------------------------

    @property
    def _component(self) -> str:
        components = self._core.components
        if len(components) > 1:
            raise ConfigError(
                "a device that somebody else owns holds full pages alone: windows and recurrent "
                "state need a device pool of the cache's own"
            )
        return components[0].name

    def _host_pages(self, tail: Node, first: int, last: int) -> PageIds:
        runs: list[bytes] = []
        for node in self._core.tree.path(tail):
            if node.start >= last or node.end <= first:
                continue
            held = node.held[HOST]
            if held is None or held.state is not READY:
                raise LeaseError(f"pages {node.start} to {node.end} are not on the host")
            pages = held_pages(node, HOST)
            start, end = max(first, node.start) - node.start, min(last, node.end) - node.start
            runs.append(pages[start * PAGE_ID_BYTES : end * PAGE_ID_BYTES])
        runs.reverse()
        return PageIds(b"".join(runs))

    def _load_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core = self._core
        copy = self._loads.pop(op.id)
        self._end(copy, op)
        lost = num_pages(copy.failed)
        core.counters.loaded_pages += op.num_pages - lost
        core.counters.load_failed_pages += lost
        self._costs.observe_load(op.num_pages - lost, op.seconds or core.clock() - op.started_s)
        core.finish(op)

    def _save_reported(self, lease: Lease, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core = self._core
        given_up = self._given_up.pop(op.id, None)
        if given_up is not None:
            self._end(given_up.copy, op)
            core.allocators[HOST].free(given_up.host)
            return
        saves = self._saves[lease]
        save = next(save for save in saves if save.copy.op == op.id)
        self._end(save.copy, op)
        save.arrived = op.agreed_pages()
        core.counters.backed_up_pages += save.arrived
        core.counters.backup_failed_pages += op.num_pages - save.arrived
        while saves and saves[0].copy.state is not ForeignState.COPYING:
            done = saves.pop(0)
            if not self._enter(lease, done):
                self._give_up(saves)
                break
        if not saves:
            self._saves.pop(lease, None)

    def _enter(self, lease: Lease, save: _Save) -> bool:
        """Its pages enter the tree, as many as have come. False: what lies behind cannot follow."""
        core, first = self._core, save.copy.first
        last = first + save.arrived
        cut = save.arrived * PAGE_ID_BYTES
        core.allocators[HOST].free(PageIds(save.host[cut:]))
        if last > first:
            anchor = lease.tail if lease.tail.end == first else self._anchor(lease, first)
            pages = [PageIds(save.host[:cut])]
            land(core, anchor, Arrival(save.key, first, last, pages, epoch=0))
            self._advance(lease)
            self._keep(lease.tail)
        return lease.tail.end >= save.last

    def _anchor(self, lease: Lease, first: int) -> Node:
        """The lease has moved on meanwhile, past where these pages begin."""
        assert lease.tail.end > first, "a save was let in before what lies in front of it"
        if first == 0:
            return self._core.tree.root(lease.key)
        return self._core.tree.node_at(lease.tail, first)

    def _give_up(self, saves: list[_Save]) -> None:
        """These come too late, or for nobody. Pages that a worker may still read or write stay
        until it has ended."""
        for save in saves:
            if save.copy.state is ForeignState.COPYING:
                self._given_up[save.copy.op] = save
            else:
                self._core.allocators[HOST].free(save.host)
        saves.clear()

    def _end(self, copy: ForeignCopy, op: Operation) -> None:
        bad = [page for page, status in _by_page(copy, op) if status]
        copy.failed = page_ids(bad)
        copy.state = ForeignState.FAILED if bad else ForeignState.DONE
        if bad:
            self._core.count_faults(op.kind, op.page_statuses())


def _by_page(copy: ForeignCopy, op: Operation) -> zip[tuple[int, int]]:
    return zip(page_array(copy.device).tolist(), op.page_statuses(), strict=True)


def _failed(first: int, device_pages: PageIds) -> ForeignCopy:
    """One that was never begun."""
    return ForeignCopy(OperationId(0), first, device_pages, ForeignState.FAILED, device_pages)
