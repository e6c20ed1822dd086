"""The names an embedding engine may rely on. Changing this list is changing the interface."""

import re
from importlib.metadata import version
from pathlib import Path

import quire
from quire import CacheManager

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


def test_the_manager_is_a_door_and_not_a_house():
    """28 public methods at most; who needs more of them asks a part of it by its name."""
    methods = [name for name in vars(CacheManager) if not name.startswith("_")]
    assert len(methods) <= 28, methods


def test_nobody_reaches_into_the_manager():
    """Its core is its own. What checks and measures it from outside goes through `inspect`, and
    nothing that serves does."""
    source = Path(quire.__file__).parent
    for path in source.rglob("*.py"):
        room = path.relative_to(source).parts[0]
        if room == "manager":
            continue
        text = path.read_text()
        assert not re.search(r"manager\.?\)?\._?core\b(?! import)", text), path
        assert "quire.manager.core" not in text, path
        if room not in ("sim", "bench"):
            assert "manager.inspection" not in text, path
