"""Helpers for tests of the control plane.

`Rig` is the real manager with *scripted* workers: the test decides which command is answered,
when, by which rank and with which statuses, so that every interleaving can be set up exactly.
Real workers, stores and processes are tested in unit/worker, unit/store and e2e.

A rig has a *mix* of components. What a test says of requests holds for all of them: the rig sees
to windows and recurrent states as an engine would.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from quire.components import Component, FullAttention, PoolSize, Recurrent, SlidingWindow, window_of
from quire.config import CacheConfig, PrefetchConfig, WriteConfig
from quire.keys import Namespace, PrefixKey, UnitKind
from quire.manager import CacheManager, Lease
from quire.manager.inspection import inspect
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
    Serve,
    StoreChanged,
    Touch,
    Transferred,
    Write,
)
from quire.tree import slot_of
from quire.types import (
    NO_SLOT,
    PageIds,
    PageKey,
    PageStatus,
    RequestId,
    Tier,
    num_pages,
    split_keys,
)

PAGE = 4
MIXES = ("full", "full+window", "full+recurrent", "full+window+recurrent")
MIX_PARTS = [(mix, part) for mix in MIXES for part in mix.split("+")]
"""Every mix, with each of its components in turn: as the one that fails, say."""
WINDOW_PAGES = 2
OK, MISS, FAILED = PageStatus.OK, PageStatus.MISS, PageStatus.FAILED
C = TypeVar("C", bound=Command)


def namespace(unit: UnitKind = UnitKind.TOKEN, **fields: Any) -> Namespace:
    values: dict[str, Any] = {"model_fingerprint": "m", "kv_dtype": "float32", "page_size": PAGE}
    return Namespace(**(values | fields), unit=unit)


def tokens_for(pages: int, seed: int, unit: UnitKind = UnitKind.TOKEN, extra: int = 0) -> list[int]:
    """Random tokens that fill exactly `pages` pages, plus `extra` on an unfinished one."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(pages * PAGE + unit.overlap + extra)]


def components_of(
    mix: str, pools: Mapping[str, PoolSize], *, page_size: int, window_pages: int
) -> list[Component]:
    """The components named in `mix`, as "full+window"."""
    components: list[Component] = []
    for index, name in enumerate(mix.split("+")):
        if name == "window":
            tokens = window_pages * page_size + 1
            components.append(SlidingWindow(index, tokens, page_size, pools[name]))
        elif name == "recurrent":
            components.append(Recurrent(index, pools[name]))
        else:
            components.append(FullAttention())
    return components


class Rig:
    def __init__(
        self,
        *,
        mix: str = "full",
        pools: Mapping[str, PoolSize] | None = None,
        window_pages: int = WINDOW_PAGES,
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
        """`pools`: of components other than full; as large as its own unless given."""
        self.now = 0.0
        self.unit = unit
        self.parts = mix.split("+")
        """Names of its components."""
        sizes = dict.fromkeys(self.parts, PoolSize(device, host)) | dict(pools or {})
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
            components=components_of(mix, sizes, page_size=PAGE, window_pages=window_pages),
        )
        self.ranks = ranks
        self.pending: list[Command] = []
        self.stored: dict[str, set[PageKey]] = {name: set() for name in self.parts}
        """Keys in the scripted store, by component."""
        if store:
            self.manager.store.attach("memory://")
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
        assert self.grow(lease, key)
        return lease

    def grow(self, lease: Lease, key: PrefixKey, *, save: bool = True) -> bool:
        """Compute and commit all pages of `key` that the lease lacks, chunk by chunk, saving the
        state after each. False: there was no room for the next."""
        manager, last = self.manager, key.num_pages
        if not manager.begin(lease):
            return False
        at = num_pages(lease.pages)
        if at >= last:
            manager.commit(lease, key)
        while at < last:
            stop = manager.next_stop(lease, at, last)
            if not (manager.extend(lease, stop - at) and manager.cover(lease, stop)):
                return False
            if save and manager.save_slot(lease) != NO_SLOT:
                manager.saved(lease, stop)
            manager.commit(lease, key[:stop])
            at = stop
        return True

    def cache(self, key: PrefixKey, **options: Any) -> None:
        """Put a prefix on device, host and store, as a finished request would."""
        self.manager.release(self.compute(key, **options))
        self.run()

    def cache_with_point(self, key: PrefixKey, point: int) -> None:
        """As `cache`, such that one can go on after `point` pages too: since another request
        branched off there. With full attention alone one always can."""
        if self.parts == ["full"]:
            self.cache(key)
            return
        self.cache(key[:point])
        other = tokens_for(1, seed=9999, unit=self.unit)
        keys = [key, self.key([*key[:point].tokens.tolist(), *other])]
        leases = [self.acquire(each) for each in keys]
        for lease, each in zip(leases, keys, strict=True):
            assert self.grow(lease, each)
        for lease in leases:
            self.manager.release(lease)
        self.cache(key[:point])  # coming to rest there copies its window out

    def cache_on_host(self, key: PrefixKey) -> None:
        self.cache(key)
        self.manager.flush(Tier.DEVICE)

    def cache_in_store(self, key: PrefixKey, points: Iterable[int] | None = None) -> None:
        """Only the store has it afterwards, with what is needed to go on at its end, or else
        after each of these pages."""
        self.stored["full"].update(split_keys(key.page_keys()))
        for point in (key.num_pages,) if points is None else points:
            for component in self.manager.components[1:]:
                keys = key.page_keys(*component.span(0, point))
                self.stored[component.name].update(split_keys(keys))

    def empty_store(self) -> None:
        for keys in self.stored.values():
            keys.clear()

    @property
    def kept_window(self) -> int:
        """Window pages that stay behind a point to go on from."""
        window = window_of(self.manager.components)
        return 0 if window is None else window.kept_pages

    def in_store(self, key: PrefixKey) -> bool:
        """Has the store all that is needed to go on at the end of `key`?"""
        return all(
            self.stored[c.name].issuperset(split_keys(key.page_keys(*c.span(0, key.num_pages))))
            for c in self.manager.components
        )

    def weight(self, num_pages: int) -> int:
        """Pages of all components that a finished request of so many pages leaves in a tier."""
        sizes = {
            "full": num_pages,
            "window": min(num_pages, self.kept_window),
            "recurrent": min(num_pages, 1),
        }
        return sum(sizes[name] for name in self.parts)

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

    def take(self, kind: type[C], component: str = "full") -> C:
        """The only pending command of a kind for a component, no longer pending: the test answers
        it."""
        found = [
            c for c in self.pending if isinstance(c, kind) and _component(c) in ("", component)
        ]
        assert len(found) == 1, f"{len(found)} pending {kind.__name__}: {self.pending}"
        self.pending.remove(found[0])
        return found[0]

    def take_all(self, kind: type[C]) -> list[C]:
        """All pending commands of a kind, of every component."""
        found: list[C] = [c for c in self.pending if isinstance(c, kind)]
        self.pending = [c for c in self.pending if not isinstance(c, kind)]
        return found

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(c, kind) for c in self.pending)

    def answer(self, command: Command, **how: Any) -> None:
        self.step(self.reports(command, **how))

    def answer_all(self, kind: type[C], component: str = "full", **how: Any) -> None:
        """Answer all pending commands of a kind: well, but those of one component as told. Of
        probes also those that follow, each of which asks for more."""
        while commands := self.take_all(kind):
            for command in commands:
                self.answer(command, **(how if _component(command) == component else {}))
            if kind is not Probe:
                return

    def reports(
        self,
        command: Command,
        *,
        statuses: Iterable[int] | PageStatus | None = None,
        ranks: Iterable[int] | None = None,
        first: int = 0,
        final: bool = True,
    ) -> list[Completion]:
        """What well-behaved workers say, unless the test says otherwise; one status: for all."""
        match command:
            case Cancel() | Serve() | Touch():
                return []
            case AttachStore(op) | DetachStore(op):
                return [StoreChanged(op, rank) for rank in range(self.ranks)]
            case ClearStore(op):
                self.empty_store()
                return [StoreChanged(op, rank) for rank in range(self.ranks)]
            case Probe(op, component, queries, each=True):
                present = [self._present(component, query) for query in queries]
                return [Probed(op, rank, component, present=present) for rank in self._ranks(ranks)]
            case Probe(op, component, queries):
                hits = [len(self._present(component, query).split(b"\0")[0]) for query in queries]
                return [Probed(op, rank, component, hits) for rank in self._ranks(ranks)]
            case Fetch(_, component, keys):
                default = bytes(OK if k else MISS for k in self._present(component, keys))
            case Backup() | Load() | Write():
                default = bytes(num_pages(command.host))
        if isinstance(statuses, PageStatus):
            statuses = [statuses] * len(default)
        chosen = default if statuses is None else bytes(statuses)
        found = b""
        if isinstance(command, Write):
            keys, _ = command.keys_and_parents()
            pairs = zip(keys, chosen, strict=True)
            self.stored[command.component].update(key for key, status in pairs if status == OK)
            found = b"" if command.has_keys or not final else b"".join(keys)
        return [
            Transferred(command.op, rank, command.component, first, chosen, final, keys=found)
            for rank in self._ranks(ranks)
        ]

    def _ranks(self, ranks: Iterable[int] | None) -> Iterable[int]:
        return range(self.ranks) if ranks is None else ranks

    def _present(self, component: str, keys: bytes) -> bytes:
        """One byte per key, 1 where the store has it."""
        return bytes(key in self.stored[component] for key in split_keys(keys))

    # ---- looking --------------------------------------------------------------------------------

    def slot(self, component: str, tier: Tier) -> int:
        return slot_of(self.parts.index(component), tier)

    def free(self, tier: Tier, component: str = "full") -> int:
        return self.manager._core.allocators[self.slot(component, tier)].num_free

    def used(self, tier: Tier) -> dict[str, int]:
        """Pages of a tier's pools that are not free, by component."""
        allocators = self.manager._core.allocators
        pools = {name: allocators[self.slot(name, tier)] for name in self.parts}
        return {name: pool.num_pages - pool.num_free for name, pool in pools.items()}

    @property
    def inflight_pages(self) -> int:
        """Host pages held by fetches at this moment."""
        return inspect(self.manager).fetches.inflight_pages

    def matched(self, key: PrefixKey) -> tuple[int, int]:
        match = self.manager.match(key)
        return match.num_device, match.num_host

    def pages_of(self, lease: Lease) -> PageIds:
        return lease.pages


def _component(command: Command) -> str:
    """Whose command it is; empty: everybody's."""
    return (
        ""
        if isinstance(command, Cancel | AttachStore | DetachStore | ClearStore)
        else (command.component)
    )


def calls_of(act: Callable[[], object]) -> int:
    """Functions that are called meanwhile: work that can be counted, whoever else is busy."""
    num_calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return num_calls
