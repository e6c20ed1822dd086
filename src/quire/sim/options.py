"""SimOptions: what kind of cache a simulation runs, and how badly it is treated.

By default everything follows from the seed, so that consecutive seeds cover the combinations; any
field may be overridden, and `command` names exactly the overrides that a repetition needs.
"""
# ruff: noqa: RUF009 - option() makes a field

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, TypeVar

from quire.components import Component, FullAttention, PoolSize, Recurrent, SlidingWindow
from quire.config import (
    CacheConfig,
    PrefetchConfig,
    PrefetchPolicy,
    SnapshotConfig,
    WriteConfig,
    WritePolicy,
)
from quire.eviction import EvictionKind


class UnitMix(enum.Enum):
    TOKEN = "token"
    PAIR = "pair"
    BOTH = "both"
    """Namespaces of either kind in one cache."""


class ComponentMix(enum.Enum):
    """Which kinds of state the simulated model has."""

    FULL = "full"
    WINDOW = "window"
    RECURRENT = "recurrent"
    BOTH = "both"


CACHE = "The cache (by default all of it follows from the seed)"
HYBRID = "Windows and recurrent state"
TROUBLE = "The trouble it is put through"


def option(default: Any, about: str, panel: str, least: int | None = None) -> Any:
    """A field, with what the command says about it, and where."""
    return field(default=default, metadata={"about": about, "panel": panel, "least": least})


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """Of one cache, alone or in each engine of a cluster. Rates are per step."""

    write_policy: WritePolicy = option(
        WritePolicy.WRITE_THROUGH, "When pages go to the host.", CACHE
    )
    prefetch_policy: PrefetchPolicy = option(
        PrefetchPolicy.TIMEOUT, "How long requests wait for the store.", CACHE
    )
    page_size: int = option(4, "Units per page.", CACHE)
    device_pages: int = option(40, "Size of the device tier.", CACHE)
    host_pages: int = option(60, "Size of the host tier.", CACHE)
    threshold_pages: int = option(2, "Shorter hits are not fetched.", CACHE, 1)
    mix: ComponentMix = option(
        ComponentMix.FULL, "What the model keeps beside full attention.", HYBRID
    )
    window_pages: int = option(3, "Pages of a sliding window.", HYBRID)
    device_windows: int = option(30, "Window pages on the device.", HYBRID)
    host_windows: int = option(24, "Window pages on the host.", HYBRID)
    device_slots: int = option(16, "Recurrent states on the device.", HYBRID)
    host_slots: int = option(10, "Recurrent states on the host.", HYBRID)
    concurrency: int = option(4, "Requests alive at once.", TROUBLE, 1)
    fault_rate: float = option(0.05, "Share of backend calls that go wrong.", TROUBLE)
    slow_share: float = option(0.02, "Share that takes a hundred times longer.", TROUBLE)
    stuck_share: float = option(0.001, "Share that outlives every deadline.", TROUBLE)
    abort_rate: float = option(0.02, "Aborts per step.", TROUBLE)
    strict: bool = option(False, "Watch every call of the manager.", TROUBLE)
    check_every: int = option(1, "Steps from one look at all invariants to the next.", TROUBLE, 1)
    store_pages: int = option(0, "Room in the store; 0: endless.", TROUBLE)
    both: bool = option(False, "What the store has comes while the front is computed.", CACHE)
    lane_pages_s: float = option(0.0, "Pages a second of each rank's lanes; 0: any.", TROUBLE)
    units: UnitMix = option(UnitMix.TOKEN, "Token units, pair units, or namespaces of both.", CACHE)
    drafts: int = option(0, "Tokens drafted at a time; 0: none are.", CACHE, 0)
    arrivals: float = option(0.0, "Per step, whoever else waits; 0: by concurrency.", TROUBLE)


@dataclass(frozen=True, slots=True)
class SimOptions(CommonOptions):
    ranks: int = option(1, "Tensor-parallel ranks.", CACHE, 1)
    eviction: EvictionKind = option(EvictionKind.LRU, "What goes first.", CACHE)
    tenant_share: float = option(1.0, "Of each tier, what one tenant may have cached.", CACHE)
    snapshot_every: int = option(0, "Pages between two snapshots; 0: only where needed.", HYBRID)
    snapshots_per_path: int = option(4, "Snapshots kept along one prefix.", HYBRID)
    events: bool = option(False, "Keep events and compare them with the tree.", CACHE)
    cost_model: bool = option(False, "Fetch only if it beats recomputing.", CACHE)
    admin_rate: float = option(0.02, "Changes of the store and flushes per step.", TROUBLE)
    lose_rank: bool = option(False, "One rank dies after two thirds of the steps.", TROUBLE)

    @classmethod
    def from_seed(cls, seed: int) -> SimOptions:
        """The small enumerations go round with the seed, the rest is drawn from it."""
        rng = Random(f"quire sim options {seed}")
        ranks = 1 + seed % 3
        return cls(
            ranks=ranks,
            write_policy=list(WritePolicy)[seed // 2 % 3],
            prefetch_policy=list(PrefetchPolicy)[seed // 3 % 3],
            eviction=list(EvictionKind)[seed % 5],
            units=list(UnitMix)[(seed + seed // 3) % 3],
            page_size=rng.choice((1, 2, 4)),
            device_pages=rng.randrange(24, 48),
            host_pages=rng.choice((rng.randrange(10, 32), rng.randrange(40, 64))),
            mix=list(ComponentMix)[seed % 4],
            window_pages=rng.choice((1, 2, 4)),
            device_windows=rng.randrange(26, 44),
            host_windows=rng.randrange(12, 40),
            device_slots=rng.choice((rng.randrange(5, 9), rng.randrange(12, 24))),
            host_slots=rng.choice((3, rng.randrange(6, 20))),
            snapshot_every=rng.choice((0, 0, 3)),
            snapshots_per_path=rng.choice((1, 3, 8)),
            threshold_pages=rng.choice((1, 1, 2, 3)),
            concurrency=rng.randrange(2, 7),
            fault_rate=rng.choice((0.0, 0.02, 0.1, 0.25)),
            slow_share=rng.choice((0.0, 0.02, 0.1)),
            stuck_share=rng.choice((0.0, 0.0005, 0.002)),
            abort_rate=rng.choice((0.0, 0.02, 0.1)),
            admin_rate=rng.choice((0.01, 0.02, 0.05)),
            lose_rank=seed % 7 == 6,
            events=rng.random() < 0.5,
            cost_model=rng.random() < 0.3,
            both=draws_both(seed),
            drafts=draws_drafts(seed),
        )

    @classmethod
    def for_swarm(cls, seed: int) -> SimOptions:
        """With what runs out drawn as well; what follows from the seed alone stays as it was."""
        rng = Random(f"quire swarm options {seed}")
        return replace(
            cls.from_seed(seed),
            **watched(seed),
            store_pages=rng.choice((0, rng.randrange(40, 400))),
            lane_pages_s=rng.choice((0.0, 30.0, 200.0)),
            arrivals=rng.choice((0.0, 0.1, 0.3)),
            tenant_share=rng.choice((1.0, 0.3)),
        )

    def cache_config(self) -> CacheConfig:
        """Timeouts short enough that all of them are met in a short run."""
        return CacheConfig(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            eviction=self.eviction,
            tenant_share=self.tenant_share,
            retention_decay_s=1.0,
            write=WriteConfig(
                policy=self.write_policy,
                low_watermark=0.2,
                high_watermark=0.4,
                retry_delay_s=0.05,
                timeout_s=1.0,
            ),
            prefetch=PrefetchConfig(
                policy=self.prefetch_policy,
                threshold_tokens=self.threshold_pages * self.page_size,
                base_timeout_s=0.5,
                max_timeout_s=1.0,
                cost_model=self.cost_model,
            ),
            snapshots=SnapshotConfig(self.snapshot_every, self.snapshots_per_path),
            num_ranks=self.ranks,
            event_buffer=4096 if self.events else 0,
        )

    def components(self) -> list[Component]:
        components: list[Component] = [FullAttention()]
        if self.mix in (ComponentMix.WINDOW, ComponentMix.BOTH):
            tokens = self.window_pages * self.page_size + 1
            pool = PoolSize(self.device_windows, self.host_windows)
            components.append(SlidingWindow(len(components), tokens, self.page_size, pool))
        if self.mix in (ComponentMix.RECURRENT, ComponentMix.BOTH):
            pool = PoolSize(self.device_slots, self.host_slots)
            components.append(Recurrent(len(components), pool))
        return components

    def pool_sizes(self) -> dict[str, PoolSize]:
        full = PoolSize(self.device_pages, self.host_pages)
        return {component.name: component.pool or full for component in self.components()}

    def command(self, seed: int, steps: int) -> str:
        """The exact command that repeats a run with these options."""
        return command_line("run", self, SimOptions.from_seed(seed), seed, steps)


def draws_both(seed: int) -> bool:
    """Of its own generator: what else follows from the seed stays as it was."""
    return Random(f"quire sim both {seed}").random() < 0.5


def watched(seed: int) -> dict[str, Any]:
    """How closely a swarm looks: every sixth run at each call and after each step. What breaks an
    invariant leaves it broken, so the others look now and then, and are three times as fast."""
    return {"strict": True} if seed % 6 == 0 else {"check_every": 13}


def draws_drafts(seed: int) -> int:
    """The same."""
    return Random(f"quire sim drafts {seed}").choice((0, 0, 1, 2, 4))


T = TypeVar("T", bound=CommonOptions)


def command_line(kind: str, options: T, default: T, seed: int, steps: int) -> str:
    """Names the options that are not as they follow from the seed."""
    words = [f"quire sim {kind} --seed {seed} --steps {steps}"]
    for name in [f.name for f in fields(options)]:
        value = getattr(options, name)
        if value != getattr(default, name):
            words.append(_flag(name, value))
    return " ".join(words)


def _flag(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value.value if isinstance(value, enum.Enum) else value}"
