"""Quire: a three-tier KV cache for LLM inference, as a library that an engine embeds.

The names below are the public ones; a test pins them. Importing this module loads no torch: what
needs it (`CacheWorker` and the pools) is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.components import FullAttention, PoolSize, Recurrent, SlidingWindow
from quire.config import (
    CacheConfig,
    PrefetchConfig,
    PrefetchPolicy,
    SnapshotConfig,
    WriteConfig,
    WritePolicy,
)
from quire.errors import (
    ConfigError,
    InvariantError,
    LeaseError,
    MemoryBudgetError,
    QuireError,
    StoreError,
    StoreURLError,
    WorkerError,
)
from quire.eviction import EvictionKind
from quire.keys import Namespace, PrefixKey, UnitKind
from quire.manager import (
    CacheEvent,
    CacheManager,
    EventBatch,
    Lease,
    LoadState,
    Prefetch,
    PrefixMatch,
    StoreChange,
)
from quire.memory.page_layout import InnerLayout, PageLayout
from quire.store import open_store
from quire.types import NO_SLOT, PageKey, PageStatus, RequestId, Tier, num_pages, page_array
from quire.worker import (
    ComponentConfig,
    IoLimits,
    LocalWorkers,
    WorkerConfig,
    WorkerGroup,
    build_worker,
    open_workers,
)

if TYPE_CHECKING:
    from quire.memory.device import DevicePool
    from quire.memory.host import HostPool
    from quire.worker.worker import CacheWorker, ComponentPools

__version__ = "0.4.0"

__all__ = [
    "NO_SLOT",
    "CacheConfig",
    "CacheEvent",
    "CacheManager",
    "CacheWorker",
    "ComponentConfig",
    "ComponentPools",
    "ConfigError",
    "DevicePool",
    "EventBatch",
    "EvictionKind",
    "FullAttention",
    "HostPool",
    "InnerLayout",
    "InvariantError",
    "IoLimits",
    "Lease",
    "LeaseError",
    "LoadState",
    "LocalWorkers",
    "MemoryBudgetError",
    "Namespace",
    "PageKey",
    "PageLayout",
    "PageStatus",
    "PoolSize",
    "Prefetch",
    "PrefetchConfig",
    "PrefetchPolicy",
    "PrefixKey",
    "PrefixMatch",
    "QuireError",
    "Recurrent",
    "RequestId",
    "SlidingWindow",
    "SnapshotConfig",
    "StoreChange",
    "StoreError",
    "StoreURLError",
    "Tier",
    "UnitKind",
    "WorkerConfig",
    "WorkerError",
    "WorkerGroup",
    "WriteConfig",
    "WritePolicy",
    "build_worker",
    "num_pages",
    "open_store",
    "open_workers",
    "page_array",
]


def __getattr__(name: str) -> object:
    """The names that need torch."""
    if name in ("CacheWorker", "ComponentPools"):
        from quire.worker import worker

        return getattr(worker, name)
    if name == "DevicePool":
        from quire.memory.device import DevicePool

        return DevicePool
    if name == "HostPool":
        from quire.memory.host import HostPool

        return HostPool
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
