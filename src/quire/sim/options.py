"""SimOptions: what kind of cache a simulation runs, and how badly it is treated.

By default everything follows from the seed, so that consecutive seeds cover the combinations; any
field may be overridden, and `command` names exactly the overrides that a repetition needs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from random import Random

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy, WriteConfig, WritePolicy
from quire.eviction import EvictionKind


class UnitMix(enum.Enum):
    TOKEN = "token"
    PAIR = "pair"
    BOTH = "both"
    """Namespaces of either kind in one cache."""


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
            host_pages=rng.choice((rng.randrange(16, 32), rng.randrange(40, 64))),
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
            num_ranks=self.ranks,
            event_buffer=4096 if self.events else 0,
        )

    def command(self, seed: int, steps: int) -> str:
        """The exact command that repeats a run with these options."""
        default = SimOptions.from_seed(seed)
        words = [f"quire sim run --seed {seed} --steps {steps}"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != getattr(default, field.name):
                words.append(_flag(field.name, value))
        return " ".join(words)


def _flag(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value.value if isinstance(value, enum.Enum) else value}"
