"""SimOptions: what kind of cache a simulation runs, and how badly it is treated.

By default everything follows from the seed, so that consecutive seeds cover the combinations; any
field may be overridden, and `command` names exactly the overrides that a repetition needs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, TypeVar

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

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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


@dataclass(frozen=True, slots=True)
class SimOptions:
    ranks: int = 1
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    eviction: EvictionKind = EvictionKind.LRU
    units: UnitMix = UnitMix.TOKEN
    page_size: int = 4
    device_pages: int = 40
    host_pages: int = 60
    mix: ComponentMix = ComponentMix.FULL
    window_pages: int = 3
    device_windows: int = 30
    """Pages of the device's window pool."""
    host_windows: int = 24
    device_slots: int = 16
    """Recurrent states that the device has room for."""
    host_slots: int = 10
    snapshot_every: int = 0
    """Pages between two snapshots taken without a reason; 0: none are."""
    snapshots_per_path: int = 4
    threshold_pages: int = 2
    """Shorter hits in the store are not fetched."""
    concurrency: int = 4
    """Requests alive at once."""
    fault_rate: float = 0.05
    """Share of backend calls that go wrong."""
    slow_share: float = 0.02
    """Share of backend calls that take a hundred times longer."""
    stuck_share: float = 0.001
    """Share of backend calls that outlive every deadline."""
    abort_rate: float = 0.02
    """Aborts per step."""
    admin_rate: float = 0.02
    """Attachments, detachments, clearings and flushes per step."""
    lose_rank: bool = False
    """One rank dies after two thirds of the steps."""
    events: bool = False
    cost_model: bool = False
    strict: bool = False
    """Every call of the manager is watched: see quire.sim.watch."""
    store_pages: int = 0
    """Pages that the store has room for, of all ranks and components; 0: as many as come."""
    lane_pages_s: float = 0.0
    """What each rank carries between device and host, and as much to the store; 0: everything."""
    arrivals: float = 0.0
    """Per step, alone or together, whether others are answered or not; 0: there are never more
    requests than `concurrency`."""

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
        )

    @classmethod
    def for_swarm(cls, seed: int) -> SimOptions:
        """With what runs out drawn as well, and every call watched; what follows from the seed
        alone stays as it was."""
        rng = Random(f"quire swarm options {seed}")
        return replace(
            cls.from_seed(seed),
            strict=True,
            store_pages=rng.choice((0, rng.randrange(40, 400))),
            lane_pages_s=rng.choice((0.0, 30.0, 200.0)),
            arrivals=rng.choice((0.0, 0.1, 0.3)),
        )

    def cache_config(self) -> CacheConfig:
        """Timeouts short enough that all of them are met in a short run."""
        return CacheConfig(
            page_size=self.page_size,
            device_pages=self.device_pages,
            host_pages=self.host_pages,
            eviction=self.eviction,
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


T = TypeVar("T", bound="DataclassInstance")


def command_line(name: str, options: T, default: T, seed: int, steps: int) -> str:
    """Names the options that are not as they follow from the seed."""
    words = [f"quire sim {name} --seed {seed} --steps {steps}"]
    for field in fields(options):
        value = getattr(options, field.name)
        if value != getattr(default, field.name):
            words.append(_flag(field.name, value))
    return " ".join(words)


def _flag(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value.value if isinstance(value, enum.Enum) else value}"
