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

With windows a save goes to a *point*: its full pages and the window behind its end, together or not
at all. Points are where a request comes to rest, the end of its prompt, and where an earlier one
had branched off, as far as the engine still has the window there.

Knows the tree and the allocators; neither engines nor bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.errors import ConfigError, LeaseError
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.fetches.landing import Arrival, land
from quire.manager.lease import Lease
from quire.manager.operations import COPY_TIMEOUT_S, Operation, OperationKind, OpState
from quire.messages import Backup, Load
from quire.tree import NUM_TIERS, Node, held_pages, slot_of
from quire.types import (
    HOST,
    NO_PAGES,
    PAGE_ID_BYTES,
    READY,
    OperationId,
    PageIds,
    PageStatus,
    num_pages,
    page_array,
    page_ids,
)


class EnginePages(NamedTuple):
    """Pages [first, last) of a prefix, of one component, where the engine has them."""

    first: int
    pages: PageIds
    width: int = 1
    """So many of the engine's pages hold one of the prefix: as many as a DevicePool has parts."""

    @property
    def last(self) -> int:
        return self.first + num_pages(self.pages) // self.width

    def covers(self, first: int, last: int) -> bool:
        return self.first <= first and last <= self.last

    def cut(self, first: int, last: int) -> EnginePages:
        size = self.width * PAGE_ID_BYTES
        mine = self.pages[(first - self.first) * size : (last - self.first) * size]
        return EnginePages(first, PageIds(mine), self.width)


class ForeignState(enum.Enum):
    COPYING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class ForeignCopy:
    """Pages of a prefix, to or from the engine's."""

    op: OperationId
    device: list[EnginePages]
    """By component."""
    state: ForeignState = ForeignState.COPYING
    failed: PageIds = NO_PAGES
    """The engine's pages that were not copied."""

    @property
    def first(self) -> int:
        return self.device[0].first

    @property
    def last(self) -> int:
        return self.device[0].last


@dataclass(slots=True, eq=False)
class _Save:
    copy: ForeignCopy
    key: PrefixKey
    host: list[PageIds]
    """By component; its own until they are in the tree."""
    arrived: int = 0
    """Leading pages that are there, once it has ended."""


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
        self._under_way: set[Lease] = set()
        """They have come behind a point, and the store has not been told of what they have saved
        there: the window that moves with them is worth nothing to it."""

    def load_into(self, lease: Lease, to: Sequence[EnginePages]) -> ForeignCopy:
        """Copy pages of the lease's prefix, which the host has, to the engine's. `to`: by
        component; of full pages those that are wanted, of other state at least what is needed to go
        on behind them."""
        lease.require_live()
        self._check(lease, to)
        core, first, last = self._core, to[0].first, to[0].last
        if not 0 <= first < last <= lease.tail.end:
            raise LeaseError(
                f"{lease.owner!r} loads pages {first} to {last} of the {lease.tail.end} that it has"
            )
        device = self._cut(to, first, last)
        if device is None:
            raise LeaseError(f"{lease.owner!r} has no place for what page {last} needs")
        if not core.healthy:
            pages = PageIds(b"".join(each.pages for each in device))
            return ForeignCopy(OperationId(0), device, ForeignState.FAILED, pages)
        host = [
            self._host_pages(lease.tail, slot_of(component.index, HOST), each)
            for component, each in zip(core.components, device, strict=True)
        ]
        op = core.operations.start(
            OperationKind.LOAD,
            self._sizes(device),
            timeout_s=COPY_TIMEOUT_S,
            on_report=self._load_reported,
            guards=core.protect(lease.tail, lease.tail),
        )
        copy = self._loads[op.id] = ForeignCopy(op.id, device)
        for component, source, target in zip(core.components, host, device, strict=True):
            core.outbox.append(Load(op.id, component.name, source, target.pages))
        return copy

    def save_from(
        self, lease: Lease, key: PrefixKey, has: Sequence[EnginePages]
    ) -> list[ForeignCopy]:
        """Copy to the host what the engine has, by component, of the pages of `key`: what is not
        there or on its way, as much as there is room for. `key` is the lease's, or one that goes on
        from it. Of other state than full pages the engine may have the end alone."""
        lease.require_live()
        self._check(lease, has)
        core, last = self._core, min(has[0].last, key.last)
        if not key.continues(lease.key, lease.tail.end):
            raise LeaseError(f"{lease.owner!r} saves another prefix than the one that it holds")
        lease.key = key
        if not self._saves.get(lease):
            self._advance(lease)  # others may have saved it since
        start = self.saved_pages(lease)
        copies: list[ForeignCopy] = []
        if has[0].first > start:
            raise LeaseError(
                f"{lease.owner!r} saves page {has[0].first}, but page {start} comes first"
            )
        if last <= start or not core.healthy or core.config.host_pages == 0:
            return []
        ends = (point for point in self._points(lease) if start < point < last)
        for point in (*ends, last):
            if point < last and self._cut(has, start, point) is None:
                continue
            copy = self._save(lease, key, has, start, point)
            if copy is None:
                break
            copies.append(copy)
            start = copy.last
        core.counters.backup_skipped_pages += last - start
        return copies

    def _save(
        self, lease: Lease, key: PrefixKey, has: Sequence[EnginePages], first: int, last: int
    ) -> ForeignCopy | None:
        """As much of it as the host has room for; None: nothing."""
        core = self._core
        last = min(last, first + core.room(HOST))
        device = self._cut(has, first, last) if last > first else None
        if device is None:
            return None
        sizes = [
            (slot_of(component.index, HOST), each.last - each.first)
            for component, each in zip(core.components, device, strict=True)
        ]
        host = core.reserve_all(sizes, core.tenant(key))
        if host is None:
            return None
        op = core.operations.start(
            OperationKind.BACKUP,
            self._sizes(device),
            timeout_s=COPY_TIMEOUT_S,
            on_report=lambda op: self._save_reported(lease, op),
        )
        save = _Save(ForeignCopy(op.id, device), key, host)
        self._saves.setdefault(lease, []).append(save)
        for component, source, target in zip(core.components, device, host, strict=True):
            core.outbox.append(Backup(op.id, component.name, source.pages, target))
        return save.copy

    def saved_pages(self, lease: Lease) -> int:
        """Pages of its prefix that are on the host, or on their way there: `save_from` goes on
        here."""
        saves = self._saves.get(lease)
        return saves[-1].copy.last if saves else lease.tail.end

    def point_before(self, lease: Lease, page: int) -> int:
        """The deepest point, page `page` at most, at which a save should end; 0: there is none."""
        return max((point for point in self._points(lease) if point <= page), default=0)

    def is_saving(self, lease: Lease) -> bool:
        return bool(self._saves.get(lease))

    def release(self, lease: Lease) -> None:
        """A lease ends: what is on its way to the host is given up, and where it is at rest now
        is worth keeping."""
        if self._saves:
            self._give_up(self._saves.pop(lease, []))
        if lease in self._under_way:
            self._under_way.remove(lease)
            self._keep(lease.tail)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Pages that are neither free nor in the tree nor a lease's, for check_invariants()."""
        index, tier = divmod(slot, NUM_TIERS)
        if tier != HOST:
            return []
        saving = [save.host[index] for saves in self._saves.values() for save in saves]
        return saving + [save.host[index] for save in self._given_up.values()]

    # ---- inside ---------------------------------------------------------------------------------

    def _check(self, lease: Lease, named: Sequence[EnginePages]) -> None:
        components = self._core.components
        are_whole = all(
            each.width > 0 and num_pages(each.pages) % each.width == 0 for each in named
        )
        if len(named) != len(components) or not are_whole:
            names = ", ".join(component.name for component in components)
            raise LeaseError(
                f"{lease.owner!r} must name the engine's pages of each of {names}, in this order, "
                "`width` of them for one of the prefix"
            )

    def _points(self, lease: Lease) -> list[int]:
        """Pages at which others will want to go on."""
        state = lease.state
        return [] if state is None else sorted({*state.branches, state.num_prompt})

    def _cut(self, has: Sequence[EnginePages], first: int, last: int) -> list[EnginePages] | None:
        """What of it pages [first, last) and going on behind them need; None: not all is there."""
        device = []
        for component, each in zip(self._core.components, has, strict=True):
            if component.is_point:
                raise ConfigError(
                    "a device that somebody else owns holds full pages and windows: recurrent "
                    "state needs a device pool of the cache's own"
                )
            span = component.span(first, last)
            if not each.covers(*span):
                return None
            device.append(each.cut(*span))
        return device

    def _sizes(self, device: Sequence[EnginePages]) -> dict[str, int]:
        return {
            component.name: each.last - each.first
            for component, each in zip(self._core.components, device, strict=True)
        }

    def _host_pages(self, tail: Node, slot: int, wanted: EnginePages) -> PageIds:
        runs: list[bytes] = []
        for node in self._core.tree.path(tail):
            if node.start >= wanted.last or node.end <= wanted.first:
                continue
            held = node.held[slot]
            if held is None or held.state is not READY:
                raise LeaseError(f"pages {node.start} to {node.end} are not on the host")
            start = max(wanted.first, node.start) - node.start
            end = min(wanted.last, node.end) - node.start
            runs.append(held_pages(node, slot)[start * PAGE_ID_BYTES : end * PAGE_ID_BYTES])
        runs.reverse()
        return PageIds(b"".join(runs))

    def _load_reported(self, op: Operation) -> None:
        if op.state is not OpState.ENDED:
            return
        core = self._core
        copy = self._loads.pop(op.id)
        self._end(copy, op)
        lost = op.num_pages - op.page_statuses()[: op.num_pages].count(PageStatus.OK)
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
            self._free(given_up.host)
            return
        saves = self._saves[lease]
        save = next(save for save in saves if save.copy.op == op.id)
        self._end(save.copy, op)
        if len(save.host) == 1:
            save.arrived = op.agreed_pages()
        else:
            save.arrived = op.num_pages if op.all_ok() else 0
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
        if last == first:
            self._free(save.host)
            return lease.tail.end >= save.copy.last
        pages = []
        for component, host in zip(core.components, save.host, strict=True):
            start, end = component.span(first, last)
            cut = (end - start) * PAGE_ID_BYTES
            core.allocators[slot_of(component.index, HOST)].free(PageIds(host[cut:]))
            pages.append(PageIds(host[:cut]))
        anchor = lease.tail if lease.tail.end == first else self._anchor(lease, first)
        tail = land(core, anchor, Arrival(save.key, first, last, pages, epoch=0))
        self._advance(lease)
        self._settle(lease, last)
        core.tidy((tail,))  # it may be of use to nobody: others may have gone on from there
        return lease.tail.end >= save.copy.last

    def _settle(self, lease: Lease, last: int) -> None:
        """What it has saved up to page `last` is in the tree: the store should have it, of models
        with windows when it has come to a point that is there to stay."""
        if lease.state is None:
            self._keep(lease.tail)
        elif lease.tail.end < last:
            return
        elif last in self._points(lease):
            point = self._core.tree.node_at(lease.tail, last)
            point.is_mark = True
            self._under_way.discard(lease)
            self._keep(point)
        else:
            self._under_way.add(lease)

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
                self._free(save.host)
        saves.clear()

    def _free(self, host: Sequence[PageIds]) -> None:
        for component, pages in zip(self._core.components, host, strict=True):
            self._core.allocators[slot_of(component.index, HOST)].free(pages)

    def _end(self, copy: ForeignCopy, op: Operation) -> None:
        statuses = iter(op.page_statuses())
        bad: list[int] = []
        for each in copy.device:
            for pages in page_array(each.pages).reshape(-1, each.width).tolist():
                if next(statuses):
                    bad += pages
        copy.failed = page_ids(bad)
        copy.state = ForeignState.FAILED if bad else ForeignState.DONE
        if bad:
            self._core.count_faults(op.kind, op.page_statuses())
