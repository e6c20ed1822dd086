"""replay(): a trace through the real manager, request by request, in the trace's own time.

Each request goes through its whole life, as an engine drives it: matched, fetched, loaded, given
its pages, computed and committed chunk by chunk, released. Workers answer at once, so one request
ends before the next begins; what many running requests would occupy is held by a lease of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy, WriteConfig, WritePolicy
from quire.eviction import EvictionKind
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager, Lease
from quire.progress import Ticks
from quire.replay.occupancy import Occupancy
from quire.replay.trace import Trace, TraceRow
from quire.types import RequestId, num_pages
from quire.worker.instant import InstantWorker

_PROGRESS_EVERY = 64
_CHUNK_TOKENS = 2048
_OCCUPIED = Namespace("occupied", "none", 1)
_PAGES = Namespace("replay", "none", 1)
"""A page is one token here, its number: the leader never looks at more than whole pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    device_pages: int
    host_pages: int
    store_pages: int = 0
    """0: there is no store."""
    occupancy: Occupancy = field(default_factory=Occupancy)
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: EvictionKind = EvictionKind.LRU

    def room(self, progress: float) -> int:
        """Different pages that all tiers together can hold when that share of the trace's time is
        over. A store holds again what the tiers above it hold."""
        in_use = self.occupancy.pages(self.device_pages, progress)
        return max(self.device_pages - in_use + self.host_pages, self.store_pages)

    def fitting(self, trace: Trace) -> Trace:
        """The trace as far as there are device pages for it beside what is in use: no cache, and so
        no bound either, can find or keep for a request what the device cannot hold for it."""

        def cut(row: TraceRow) -> TraceRow:
            in_use = self.occupancy.pages(self.device_pages, trace.progress(row))
            room = self.device_pages - in_use
            answer = row.answer_pages[: max(room - len(row.pages), 0)]
            return replace(row, pages=row.pages[:room], answer_pages=answer)

        return replace(trace, rows=[cut(row) for row in trace.rows])

    def cache_config(self) -> CacheConfig:
        return CacheConfig(
            page_size=1,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            eviction=self.eviction,
            write=WriteConfig(policy=self.write_policy),
            prefetch=PrefetchConfig(
                policy=PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=1, cost_model=False
            ),
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Where the pages of one prompt came from."""

    device: int
    host: int
    store: int

    @property
    def num_pages(self) -> int:
        return self.device + self.host + self.store


@dataclass(frozen=True, slots=True)
class Outcome:
    found: list[Replayed]
    """By request."""
    num_cut: int
    """Requests that did not fit on the device beside what was in use: computed, not all cached."""
    counters: dict[str, int]


def replay(trace: Trace, options: ReplayOptions, progress: Ticks = lambda done: None) -> Outcome:
    run = _Run(trace, options)
    found = []
    for number, row in enumerate(trace.rows):
        found.append(run.serve(row))
        if number % _PROGRESS_EVERY == 0:
            progress(number)
    progress(len(trace.rows))
    return Outcome(found, run.num_cut, run.manager.counters.snapshot())


class _Run:
    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        self._options = options
        self._trace = trace
        self._now_s = trace.rows[0].at_s
        self._chunk_pages = max(_CHUNK_TOKENS // trace.block_tokens, 1)
        self.manager = CacheManager(options.cache_config(), clock=lambda: self._now_s)
        self._worker = InstantWorker(options.store_pages)
        self._occupied: Lease | None = None
        self.num_cut = 0
        if options.store_pages:
            self.manager.store.attach("replay://")
            self._settle()

    def serve(self, row: TraceRow) -> Replayed:
        manager = self.manager
        self._now_s = row.at_s
        self._occupy(self._trace.progress(row))
        prompt = PrefixKey(_PAGES, np.array(row.pages, "<i4"))
        match = manager.match(prompt)
        with manager.acquire(match, RequestId("replay")) as lease:
            if self._options.store_pages:
                manager.prefetch(lease)
            self._settle()  # an engine steps between a request's arrival and its admission
            manager.admit(lease)
            while manager.load(lease):
                self._settle()
            whole = prompt.extend(row.answer_pages) if row.answer_pages else prompt
            room = self._give(lease, whole)
            if manager.stream(lease):  # what the host had no room for
                self._settle()
                assert lease.stream is None, "workers are done, and the stream is not"
            reused = lease.num_device
            self._compute(lease, whole[:room])
            self.num_cut += room < whole.last
        self._settle()
        device = min(match.num_device, reused)
        host = min(match.num_host, reused - device)
        return Replayed(device, host, reused - device - host)

    def _settle(self) -> None:
        """Step until nobody has anything more to do."""
        commands = self.manager.step()
        while commands:
            commands = self.manager.step(self._worker.answer(commands))

    def _compute(self, lease: Lease, key: PrefixKey) -> None:
        """And share, chunk by chunk."""
        while lease.num_device < key.last:
            done = min(lease.num_device + self._chunk_pages, key.last)
            self.manager.commit(lease, key[:done])
            self._settle()

    def _give(self, lease: Lease, key: PrefixKey) -> int:
        """Device pages for all of it, or for as much as fits; up to which page there are some."""
        if not self._extend(lease, key.last - lease.num_device):
            while self._extend(lease, 1):
                pass
        return lease.num_device + num_pages(lease.private_pages)

    def _extend(self, lease: Lease, count: int) -> bool:
        if self.manager.extend(lease, count):
            return True
        self._settle()  # what is written back may make room
        return self.manager.extend(lease, count)

    def _occupy(self, progress: float) -> None:
        """Have as much of the device in use as there should be, growing as requests would."""
        wanted = self._options.occupancy.pages(self._options.device_pages, progress)
        held = num_pages(self._occupied.private_pages) if self._occupied is not None else 0
        if wanted < held:
            assert self._occupied is not None
            self.manager.release(self._occupied)
            self._occupied, held = None, 0
        if wanted > held and self._occupied is None:
            nothing = self.manager.match(PrefixKey(_OCCUPIED, []))
            self._occupied = self.manager.acquire(nothing, RequestId("occupied"))
        while held < wanted:
            assert self._occupied is not None
            count = min(wanted - held, self._chunk_pages)
            if not self._extend(self._occupied, count):
                break
            held += count
            self._settle()
