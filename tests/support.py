"""Helpers for tests of the control plane.

`Rig` is the real manager with *scripted* workers: the test decides which command is answered,
when, by which rank and with which statuses, so that every interleaving can be set up exactly.
Real workers, stores and processes are tested in unit/worker, unit/store and e2e.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, TypeVar

from quire.config import CacheConfig, PrefetchConfig, WriteConfig
from quire.keys import Namespace, PrefixKey, UnitKind
from quire.manager import CacheManager, Lease
from quire.messages import (
    AttachStore,
    Backup,
    Cancel,
    ClearStore,
    Command,
    Completion,
    DetachStore,
    Fetch,
    Load,
    Probe,
    Probed,
    StoreChanged,
    Transferred,
    Write,
)
from quire.types import PageIds, PageKey, PageStatus, RequestId, Tier, num_pages, split_keys

PAGE = 4
OK, MISS, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.FAILED
C = TypeVar("C", bound=Command)


def namespace(unit: UnitKind = UnitKind.TOKEN, **fields: Any) -> Namespace:
    values: dict[str, Any] = {"model_fingerprint": "m", "kv_dtype": "float32", "page_size": PAGE}
    return Namespace(**(values | fields), unit=unit)


def tokens_for(pages: int, seed: int, unit: UnitKind = UnitKind.TOKEN, extra: int = 0) -> list[int]:
    """Random tokens that fill exactly `pages` pages, plus `extra` on an unfinished one."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(pages * PAGE + unit.overlap + extra)]


class Rig:
    def __init__(
        self,
        *,
        device: int = 64,
        host: int = 64,
        ranks: int = 1,
        unit: UnitKind = UnitKind.TOKEN,
        store: bool = True,
        threshold_pages: int = 2,
        write: WriteConfig | None = None,
        prefetch: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.unit = unit
        self.namespace = namespace(unit)
        options = {"threshold_tokens": threshold_pages * PAGE, "max_inflight_share": 1.0}
        self.manager = CacheManager(
            CacheConfig(
                page_size=PAGE,
                device_pages=device,
                host_pages=host,
                num_ranks=ranks,
                write=write or WriteConfig(),
                prefetch=PrefetchConfig(**(options | (prefetch or {}))),
                **config,
            ),
            clock=lambda: self.now,
        )
        self.ranks = ranks
        self.pending: list[Command] = []
        self.stored: set[PageKey] = set()
        """Keys in the scripted store."""
        if store:
            self.manager.attach_store("memory://")
            self.run()
        self._requests = 0

    # ---- requests -------------------------------------------------------------------------------

    def key(self, tokens: Iterable[int]) -> PrefixKey:
        return PrefixKey(self.namespace, list(tokens))

    def doc(self, pages: int, seed: int) -> PrefixKey:
        return self.key(tokens_for(pages, seed, self.unit))

    def acquire(self, key: PrefixKey, **options: Any) -> Lease:
        self._requests += 1
        return self.manager.acquire(
            self.manager.match(key), RequestId(f"r{self._requests}"), **options
        )

    def compute(self, key: PrefixKey, **options: Any) -> Lease:
        """A request that computes all that is not cached, still holding its lease."""
        lease = self.acquire(key, **options)
        self.manager.load(lease)
        self.run()
        assert self.manager.extend(lease, key.num_pages - lease.num_device)
        self.manager.commit(lease, key)
        return lease

    def cache(self, key: PrefixKey, **options: Any) -> None:
        """Put a prefix on device, host and store, as a finished request would."""
        self.manager.release(self.compute(key, **options))
        self.run()

    def cache_on_host(self, key: PrefixKey) -> None:
        self.cache(key)
        self.manager.flush(Tier.DEVICE)

    def cache_in_store(self, key: PrefixKey) -> None:
        """Only the store has it afterwards."""
        self.stored.update(split_keys(key.page_keys()))

    # ---- workers --------------------------------------------------------------------------------

    def step(self, reports: Iterable[Completion] = ()) -> list[Command]:
        """One step of the manager; its commands are pending until answered."""
        commands = self.manager.step(reports)
        self.pending += commands
        self.manager.check_invariants()
        return commands

    def run(self) -> None:
        """Step and answer everything well until nothing is left to do."""
        self.step()
        while self.pending:
            commands, self.pending = self.pending, []
            self.step([r for c in commands for r in self.reports(c)])

    def take(self, kind: type[C]) -> C:
        """The only pending command of a kind, no longer pending: the test answers it."""
        found = [c for c in self.pending if isinstance(c, kind)]
        assert len(found) == 1, f"{len(found)} pending {kind.__name__}: {self.pending}"
        self.pending.remove(found[0])
        return found[0]

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(c, kind) for c in self.pending)

    def answer(self, command: Command, **how: Any) -> None:
        self.step(self.reports(command, **how))

    def reports(
        self,
        command: Command,
        *,
        statuses: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
        first: int = 0,
        final: bool = True,
    ) -> list[Completion]:
        """What well-behaved workers say, unless the test says otherwise."""
        match command:
            case Cancel():
                return []
            case AttachStore(op) | DetachStore(op):
                return [StoreChanged(op, rank) for rank in range(self.ranks)]
            case ClearStore(op):
                self.stored.clear()
                return [StoreChanged(op, rank) for rank in range(self.ranks)]
            case Probe(op, component, queries):
                hits = [self._leading(query) for query in queries]
                return [Probed(op, rank, component, hits) for rank in self._ranks(ranks)]
            case Fetch():
                known = [k in self.stored for k in split_keys(command.keys)]
                default = bytes(OK if k else MISS for k in known)
            case Backup() | Load() | Write():
                default = bytes(num_pages(command.host))
        chosen = default if statuses is None else bytes(statuses)
        if isinstance(command, Write):
            pairs = zip(split_keys(command.keys), chosen, strict=True)
            self.stored.update(key for key, status in pairs if status == OK)
        return [
            Transferred(command.op, rank, command.component, first, chosen, final)
            for rank in self._ranks(ranks)
        ]

    def _ranks(self, ranks: Iterable[int] | None) -> Iterable[int]:
        return range(self.ranks) if ranks is None else ranks

    def _leading(self, query: bytes) -> int:
        keys = split_keys(query)
        return next((i for i, k in enumerate(keys) if k not in self.stored), len(keys))

    # ---- looking --------------------------------------------------------------------------------

    def free(self, tier: Tier) -> int:
        return self.manager.core.allocators[tier].num_free

    def matched(self, key: PrefixKey) -> tuple[int, int]:
        match = self.manager.match(key)
        return match.num_device, match.num_host

    def pages_of(self, lease: Lease) -> PageIds:
        return lease.pages
