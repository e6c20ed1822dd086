"""The names an embedding engine may rely on. Changing this list is changing the interface."""

import re
from importlib.metadata import version
from pathlib import Path

import quire

PUBLIC = [
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


def test_the_public_names_are_pinned():
    assert quire.__all__ == PUBLIC


def test_every_public_name_is_there():
    assert [name for name in PUBLIC if getattr(quire, name, None) is None] == []


def test_a_wrong_name_is_an_attribute_error():
    assert not hasattr(quire, "NoSuchName")


def test_the_version_is_said_once():
    assert version("quire") == quire.__version__
    changelog = Path(__file__).parents[2] / "CHANGELOG.md"
    assert re.search(r"^## (\S+)", changelog.read_text(), re.MULTILINE)[1] == quire.__version__
