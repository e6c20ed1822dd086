"""CacheConfig: every option of the cache, frozen, validated once where it is built.

Sizes are in pages: what a page weighs is the workers' business. Contradictions raise ConfigError
naming the option and the fix.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire.errors import ConfigError
from quire.eviction import EvictionKind


class WritePolicy(enum.Enum):
    """When a computed page is copied from device to host (and from there to the store)."""

    WRITE_THROUGH = "write_through"
    """At once."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it has been reused `WriteConfig.selective_hits` times."""
    WRITE_BACK = "write_back"
    """When the device runs short of free pages, coldest first, ahead of eviction."""


class PrefetchPolicy(enum.Enum):
    """How long a request waits for pages on their way from the store."""

    BEST_EFFORT = "best_effort"
    """Not at all: it starts with what has arrived when it is scheduled."""
    WAIT_COMPLETE = "wait_complete"
    """Until everything the probe promised has arrived or failed."""
    TIMEOUT = "timeout"
    """At most base + per-1024-tokens, capped."""


@dataclass(frozen=True, slots=True)
class WriteConfig:
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    selective_hits: int = 2
    low_watermark: float = 0.001
    """Free share of the device below which cold pages are copied out ahead of eviction."""
    high_watermark: float = 0.002
    """Free or cheaply freeable share at which that stops."""
    max_attempts: int = 3
    """Tries per page to get it into the store, before it is left for the next use to repair."""
    retry_delay_s: float = 0.5
    timeout_s: float = 30.0
    enabled: bool = True
    """False: nothing is copied to host or store for its own sake, only what a peer asks for."""

    def __post_init__(self) -> None:
        _require(self.selective_hits >= 1, "write.selective_hits", "must be at least 1")
        _require(
            0 <= self.low_watermark <= self.high_watermark <= 1,
            "write.low_watermark",
            "watermarks must satisfy 0 ≤ low ≤ high ≤ 1",
        )
        _require(self.max_attempts >= 1, "write.max_attempts", "must be at least 1")
        _require(self.timeout_s > 0, "write.timeout_s", "must be positive")


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    threshold_tokens: int = 256
    """Shorter hits are recomputed."""
    base_timeout_s: float = 1.0
    timeout_per_1024_tokens_s: float = 0.25
    max_timeout_s: float = 10.0
    max_inflight_share: float = 0.5
    """Share of the host pool that fetches in flight may hold together."""
    cost_model: bool = True
    """Fetch only what measured rates say arrives sooner than it could be recomputed."""

    def __post_init__(self) -> None:
        _require(self.threshold_tokens >= 1, "prefetch.threshold_tokens", "must be at least 1")
        _require(
            0 < self.base_timeout_s <= self.max_timeout_s,
            "prefetch.base_timeout_s",
            "must be positive and at most prefetch.max_timeout_s",
        )
        _require(
            self.timeout_per_1024_tokens_s >= 0,
            "prefetch.timeout_per_1024_tokens_s",
            "must not be negative",
        )
        _require(
            0 < self.max_inflight_share <= 1, "prefetch.max_inflight_share", "must be in (0, 1]"
        )

    def timeout_s(self, num_tokens: int) -> float:
        wanted = self.base_timeout_s + self.timeout_per_1024_tokens_s * num_tokens / 1024
        return min(wanted, self.max_timeout_s)


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Recurrent models: where snapshots are taken, beside the ends of prompts and turns and the
    places where prompts were seen to branch."""

    every_pages: int = 0
    """Also every so many pages; 0: not."""
    per_path: int = 8
    """Snapshots kept along one prefix: each weighs as much as thousands of tokens. 0: none are
    taken, and recurrent models reuse nothing."""

    def __post_init__(self) -> None:
        _require(self.every_pages >= 0, "snapshots.every_pages", "must not be negative")
        _require(self.per_path >= 0, "snapshots.per_path", "must not be negative")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int
    device_pages: int
    host_pages: int
    """0 switches the host tier off, and with it the store, which is reached through it."""
    eviction: EvictionKind = EvictionKind.LRU
    retention_decay_s: float = 60.0
    retained_share: float = 0.25
    """Of each tier, what requests may have retained at most."""
    tenant_share: float = 1.0
    """Of each tier, what the prefixes of one tenant (a namespace with a salt) may have cached; 1:
    all of it."""
    write: WriteConfig = field(default_factory=WriteConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    num_ranks: int = 1
    event_buffer: int = 0
    """Events kept for `events.take()`; 0 switches events off."""
    event_tokens: bool = False
    """Events of pages that appear say of which tokens they are."""
    threshold_pages: int = field(init=False)
    """The prefetch threshold in pages."""
    max_inflight_pages: int = field(init=False)
    """Host pages that fetches in flight may hold together."""

    def __post_init__(self) -> None:
        _require(self.page_size >= 1, "page_size", "must be at least 1")
        _require(self.device_pages >= 1, "device_pages", "must be at least 1")
        _require(self.host_pages >= 0, "host_pages", "must not be negative")
        _require(self.num_ranks >= 1, "num_ranks", "must be at least 1")
        _require(self.event_buffer >= 0, "event_buffer", "must not be negative")
        _require(self.retention_decay_s > 0, "retention_decay_s", "must be positive")
        _require(0 <= self.retained_share <= 1, "retained_share", "must be in [0, 1]")
        _require(0 < self.tenant_share <= 1, "tenant_share", "must be in (0, 1]")
        _require(
            self.host_pages > 0 or self.write.policy is WritePolicy.WRITE_THROUGH,
            "write.policy",
            f"{self.write.policy.value} needs a host tier: give host_pages or drop write.policy",
        )
        threshold_pages = -(-self.prefetch.threshold_tokens // self.page_size)
        inflight_pages = int(self.host_pages * self.prefetch.max_inflight_share)
        object.__setattr__(self, "threshold_pages", threshold_pages)
        object.__setattr__(self, "max_inflight_pages", inflight_pages)
        _require(
            self.host_pages == 0 or threshold_pages <= inflight_pages,
            "prefetch.threshold_tokens",
            f"asks for {threshold_pages} pages, but fetches in flight may hold only "
            f"{inflight_pages}: lower it, or raise host_pages or "
            "prefetch.max_inflight_share",
        )


def _require(condition: bool, option: str, problem: str) -> None:
    if not condition:
        raise ConfigError(f"{option}: {problem}")
