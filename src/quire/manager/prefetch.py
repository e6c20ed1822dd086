"""Prefetcher: from the store to the host (L3 → L2) while a request still queues.

    QUEUED ──flush──▶ PROBING ──hit──▶ FETCHING ──ended, or settled──▶ DONE
       │                  ├─only asked─▶ PROBED ─fetch─▶ (as after a hit)  │
       └───────declined───┴──miss, declined──────────────────────────────┘

The probe asks how long a prefix the store holds; one command carries the probes of all requests
of a step. Host pages are reserved only for pages that hit. If they do not fit, the shortfall is
evicted; if that is not enough, the fetch is cut to the pages that are free, as long as those reach
the threshold. Cutting concerns only the end: keys and anchor describe what lies before.

With several components the end is always a point that can be gone on from: the deepest, within
what was found and what fits, that has its window and its snapshot in the store. All its pages of
`full`, the window behind it and the snapshot at it are fetched together, and are of use together.

Pages that have arrived enter the tree under the anchor when the fetch ends or the request is
admitted, whichever comes first. Pages still on their way then stay with the operation until its
last report, and are freed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quire.config import PrefetchPolicy
from quire.keys import PrefixKey
from quire.manager.core import Core
from quire.manager.costs import CostModel
from quire.manager.counters import Decline, Fit
from quire.manager.landing import Arrival, land
from quire.manager.lease import Lease
from quire.manager.operations import Kind, Operation, OpState
from quire.messages import Cancel, Fetch, Probe
from quire.tree import Node, slot_of
from quire.types import (
    HOST,
    NO_PAGES,
    PAGE_ID_BYTES,
    PAGE_KEY_BYTES,
    OperationId,
    PageIds,
    Tier,
    num_pages,
)

PROBE_TIMEOUT_S = 5.0
GRACE_S = 5.0
"""How much longer than the worker the manager waits before it goes on without it."""


class PrefetchState(enum.Enum):
    QUEUED = enum.auto()
    PROBING = enum.auto()
    PROBED = enum.auto()
    """The hit length is known, and nobody has asked for the pages yet."""
    FETCHING = enum.auto()
    DONE = enum.auto()


@dataclass(slots=True, eq=False)
class Prefetch:
    """One request's prefetch. `key` is the whole prefix wanted; pages before `first` are there."""

    key: PrefixKey
    first: int
    anchor: Node
    """What the pages will hang under. The lease protects it: a prefetch never outlives its
    lease."""
    started_s: float
    wants_fetch: bool
    """False: only the hit length is wanted, for now."""
    state: PrefetchState = PrefetchState.QUEUED
    declined: Decline | None = None
    num_hit: int = 0
    """Pages the store was found to have."""
    num_fetching: int = 0
    """Pages really reserved and asked for."""
    num_landed: int = 0
    op: Operation | None = None
    present: list[bytes] | None = None
    """Per component which of the pages found the store has; None: there is only `full`."""


@dataclass(slots=True, eq=False)
class _Reserved:
    """Host pages of a fetch, per component, that are not in the tree (yet)."""

    prefetch: Prefetch
    pages: list[PageIds]
    epoch: int
    """The store they come from."""
    landed: bool = False


class Prefetcher:
    def __init__(self, core: Core, costs: CostModel) -> None:
        self._core = core
        self._costs = costs
        self._queued: list[Prefetch] = []
        self._probing: dict[OperationId, list[Prefetch]] = {}
        self._fetching: dict[OperationId, _Reserved] = {}
        self.inflight_pages = 0
        """Host pages held by fetches at this moment."""

    # ---- for the manager ------------------------------------------------------------------------

    def start(self, lease: Lease, *, fetch: bool) -> Prefetch:
        """Begin looking for what comes after the lease's tail; `fetch` it when found."""
        core = self._core
        prefetch = Prefetch(
            key=lease.key,
            first=lease.tail.end,
            anchor=lease.tail,
            started_s=core.clock(),
            wants_fetch=fetch,
        )
        reason = self._reason_not_to_probe(prefetch)
        if reason is not None:
            return self._decline(prefetch, reason)
        if prefetch.first:
            prefetch.key.anchor(prefetch.first, core.tree.keys_of(lease.tail)[-PAGE_KEY_BYTES:])
        self._queued.append(prefetch)
        return prefetch

    def fetch(self, prefetch: Prefetch) -> None:
        """What was only asked about is wanted now."""
        if not prefetch.wants_fetch:
            prefetch.wants_fetch = True
            if prefetch.state is PrefetchState.PROBED:
                self._found(prefetch, prefetch.num_hit)

    def is_over(self, prefetch: Prefetch) -> bool:
        """Need the request wait no longer, by the prefetch policy?"""
        if prefetch.state in (PrefetchState.DONE, PrefetchState.PROBED):
            return True
        match self._core.config.prefetch.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return True
            case PrefetchPolicy.WAIT_COMPLETE:
                return False
            case PrefetchPolicy.TIMEOUT:
                return self._core.clock() >= self._timeout_at(prefetch)

    def next_timeout(self, prefetch: Prefetch | None) -> float | None:
        """When the policy will stop waiting for it, if it is time that decides."""
        if prefetch is None or self._core.config.prefetch.policy is not PrefetchPolicy.TIMEOUT:
            return None
        return None if self.is_over(prefetch) else self._timeout_at(prefetch)

    def settle(self, prefetch: Prefetch) -> None:
        """The request goes on now: land what has arrived and stop the rest. Any state, any time."""
        if prefetch.state is PrefetchState.DONE:
            return
        if prefetch.state is PrefetchState.PROBED:
            prefetch.state = PrefetchState.DONE
        elif prefetch.op is not None and prefetch.state is PrefetchState.FETCHING:
            self._core.outbox.append(Cancel(prefetch.op.id))
            self._land(prefetch, prefetch.op)
        else:
            self._queued = [p for p in self._queued if p is not prefetch]
            self._decline(prefetch, Decline.ABORTED)

    def flush(self) -> None:
        """Send the probes of this step, all in one command per component."""
        if not self._queued:
            return
        batch, self._queued = self._queued, []
        core = self._core
        if not core.healthy:  # a rank was lost since: its answer would never come
            for prefetch in batch:
                self._decline(prefetch, Decline.WORKER_LOST)
            return
        op = core.operations.start(
            Kind.PROBE,
            len(batch),  # of every component
            now=core.clock(),
            timeout_s=PROBE_TIMEOUT_S + GRACE_S,
            on_report=self._probe_reported,
        )
        queries = [p.key.page_keys(p.first, p.key.last) for p in batch]
        for component in core.components:
            each = component.index > 0
            core.outbox.append(Probe(op.id, component.name, queries, PROBE_TIMEOUT_S, each))
        for prefetch in batch:
            prefetch.state = PrefetchState.PROBING
        self._probing[op.id] = batch

    @property
    def has_work(self) -> bool:
        return bool(self._queued)

    def reserved_pages(self, slot: int) -> list[PageIds]:
        """Host pages owned by fetches, for check_invariants()."""
        component, tier = divmod(slot, len(Tier))
        if tier != HOST:
            return []
        return [reserved.pages[component] for reserved in self._fetching.values()]

    # ---- deciding -------------------------------------------------------------------------------

    def _reason_not_to_probe(self, prefetch: Prefetch) -> Decline | None:
        config = self._core.config
        if config.host_pages == 0:
            return Decline.NO_HOST
        if self._core.store_epoch == 0:
            return Decline.NO_STORE
        if not self._core.healthy:
            return Decline.WORKER_LOST
        if prefetch.key.last - prefetch.first < config.threshold_pages:
            return Decline.BELOW_THRESHOLD
        if config.max_inflight_pages - self.inflight_pages < config.threshold_pages:
            return Decline.BUDGET
        return None

    def _timeout_at(self, prefetch: Prefetch) -> float:
        wanted = prefetch.num_fetching or prefetch.key.last - prefetch.first
        tokens = wanted * self._core.config.page_size
        return prefetch.started_s + self._core.config.prefetch.timeout_s(tokens)

    def _decline(self, prefetch: Prefetch, reason: Decline) -> Prefetch:
        prefetch.declined = reason
        prefetch.state = PrefetchState.DONE
        self._core.counters.declined[reason] += 1
        return prefetch

    def _probe_reported(self, op: Operation) -> None:
        if op.state is OpState.RUNNING:
            return
        batch = self._probing.pop(op.id, [])  # empty when it was overdue before it ended
        hits = op.hits if op.state is OpState.ENDED and not op.error else None
        for index, prefetch in enumerate(batch):
            if prefetch.state is not PrefetchState.PROBING:
                continue  # settled meanwhile
            if hits is not None:
                wanted = prefetch.key.last - prefetch.first
                hit = max(0, min(hits[index], wanted))
                self._found(prefetch, self._usable_hit(prefetch, hit, op, index))
            elif self._core.healthy:
                self._decline(prefetch, Decline.PROBE_FAILED)
            else:
                self._decline(prefetch, Decline.WORKER_LOST)

    def _usable_hit(self, prefetch: Prefetch, hit: int, op: Operation, index: int) -> int:
        """Of the pages of `full` that the store has: those before the deepest point that has all
        its state there too."""
        components = self._core.components
        if len(components) == 1 or hit == 0:
            return hit
        prefetch.present = [b"\1" * hit]
        for component in components[1:]:
            answers = (op.present or {}).get(component.name)
            present = answers[index][:hit] if answers else b""
            prefetch.present.append(present.ljust(hit, b"\0"))
        return self._point_before(prefetch, hit)

    def _point_before(self, prefetch: Prefetch, count: int) -> int:
        """Pages up to the deepest point within `count` pages that the store was found to have."""
        if prefetch.present is None:
            return count
        first = prefetch.first
        limit = first + count
        while True:
            agreed = limit
            for component, present in zip(self._core.components, prefetch.present, strict=True):
                agreed = component.reachable(present, first, agreed)
            if agreed == limit:
                return agreed - first
            limit = agreed

    def _found(self, prefetch: Prefetch, hit: int) -> None:
        config = self._core.config
        prefetch.num_hit = hit
        if not prefetch.wants_fetch:
            prefetch.state = PrefetchState.PROBED
        elif not self._core.healthy:  # lost after it had answered: a fetch would never end
            self._decline(prefetch, Decline.WORKER_LOST)
        elif self._core.store_epoch == 0:
            self._decline(prefetch, Decline.NO_STORE)
        elif hit < config.threshold_pages:
            lacks_state = prefetch.present is not None and len(prefetch.present[0]) > hit
            self._decline(prefetch, Decline.NO_STATE if lacks_state else Decline.SHORT_HIT)
        elif not self._costs.worth_fetching(hit):
            self._decline(prefetch, Decline.SLOWER_THAN_RECOMPUTE)
        else:
            budget = config.max_inflight_pages - self.inflight_pages
            if budget < config.threshold_pages:
                self._decline(prefetch, Decline.BUDGET)
            else:
                self._reserve_and_fetch(prefetch, min(hit, budget))

    def _reserve_and_fetch(self, prefetch: Prefetch, wanted: int) -> None:
        """Exact fit, else evict the shortfall, else cut to what is free, else decline."""
        core = self._core
        fit, threshold = Fit.EXACT, core.config.threshold_pages
        wanted = self._point_before(prefetch, wanted)
        if wanted < threshold:
            self._decline(prefetch, Decline.BUDGET)
            return
        pages = self._allocate(prefetch, wanted)
        if pages is None:
            fit = Fit.EVICTED
            for slot, size in self._sizes(prefetch, wanted):
                core.evict(slot, size - core.allocators[slot].num_free)
            pages = self._allocate(prefetch, wanted)
        if pages is None:
            fit = Fit.TRUNCATED
            free = core.allocators[HOST].num_free
            wanted = self._point_before(prefetch, min(wanted, free))
            if wanted < threshold:
                self._decline(prefetch, Decline.HOST_FULL)
                return
            if any(core.allocators[s].num_free < n for s, n in self._sizes(prefetch, wanted)[1:]):
                self._decline(prefetch, Decline.NO_SLOT)
                return
            pages = self._allocate(prefetch, wanted)
        if pages is None:
            self._decline(prefetch, Decline.ALLOCATION_FAILED)
            return
        core.counters.fetched[fit] += 1
        self._fetch(prefetch, wanted, pages)

    def _sizes(self, prefetch: Prefetch, count: int) -> list[tuple[int, int]]:
        """Host pages needed in each component's slot to go on after `count` pages."""
        first, sizes = prefetch.first, []
        for component in self._core.components:
            start, end = component.span(first, first + count)
            sizes.append((slot_of(component.index, HOST), end - start))
        return sizes

    def _allocate(self, prefetch: Prefetch, count: int) -> list[PageIds] | None:
        """What going on after `count` pages needs, in every component or in none."""
        if prefetch.present is None:
            full = self._core.allocators[HOST].allocate(count)
            return None if full is None else [full]
        taken: list[tuple[int, PageIds]] = []
        for slot, size in self._sizes(prefetch, count):
            pages = self._core.allocators[slot].allocate(size)
            if pages is None:
                for done, back in taken:
                    self._core.allocators[done].free(back)
                return None
            taken.append((slot, pages))
        return [pages for _, pages in taken]

    # ---- fetching -------------------------------------------------------------------------------

    def _fetch(self, prefetch: Prefetch, count: int, pages: list[PageIds]) -> None:
        core = self._core
        timeout_s = core.config.prefetch.max_timeout_s
        first, last = prefetch.first, prefetch.first + count
        op = core.operations.start(
            Kind.FETCH,
            {c.name: num_pages(p) for c, p in zip(core.components, pages, strict=True)},
            now=core.clock(),
            timeout_s=timeout_s + GRACE_S,
            on_report=self._fetch_reported,
        )
        prefetch.op, prefetch.num_fetching = op, count
        prefetch.state = PrefetchState.FETCHING
        self._fetching[op.id] = _Reserved(prefetch, pages, core.store_epoch)
        self.inflight_pages += count
        for component, host in zip(core.components, pages, strict=True):
            keys = prefetch.key.page_keys(*component.span(first, last))
            core.outbox.append(Fetch(op.id, component.name, keys, host, timeout_s))

    def _fetch_reported(self, op: Operation) -> None:
        reserved = self._fetching[op.id]
        if op.state is OpState.RUNNING:
            return  # progress is read when it is wanted
        self._land(reserved.prefetch, op)
        if op.state is OpState.ENDED:
            del self._fetching[op.id]
            agreed = self._arrived(op)
            if agreed < op.num_pages:
                self._core.counters.fetch_missed_pages += op.num_pages - agreed
                self._core.count_faults(op.kind, op.page_statuses())
            self._costs.observe_fetch(agreed, self._core.clock() - op.started_s)
            self.inflight_pages -= num_pages(reserved.pages[0])
            for component, pages in zip(self._core.components, reserved.pages, strict=True):
                self._core.allocators[slot_of(component.index, HOST)].free(pages)
            self._core.finish(op)

    def _arrived(self, op: Operation) -> int:
        """Pages that every rank has and that can be used: with several components all or none."""
        if len(self._core.components) == 1:
            return op.agreed_pages()
        return op.num_pages * op.all_ok()

    def _land(self, prefetch: Prefetch, op: Operation) -> None:
        """Publish the pages every rank has, once; what comes later is not looked at."""
        reserved = self._fetching[op.id]
        if reserved.landed:
            return
        reserved.landed = True
        core = self._core
        count = self._arrived(op)
        prefetch.num_landed = count
        prefetch.state = PrefetchState.DONE
        if count:
            self.inflight_pages -= count
            cut = count * PAGE_ID_BYTES
            pages = [PageIds(reserved.pages[0][:cut]), *reserved.pages[1:]]
            rest = PageIds(reserved.pages[0][cut:])
            reserved.pages = [rest, *(NO_PAGES for _ in reserved.pages[1:])]
            last = prefetch.first + count
            tail = land(
                core,
                prefetch.anchor,
                Arrival(prefetch.key, prefetch.first, last, pages, reserved.epoch),
            )
            core.counters.fetched_pages += count
            core.tidy((tail,))
