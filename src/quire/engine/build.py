"""From an EngineConfig to an Engine: what a page weighs, how many there are, who holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from quire.config import CacheConfig, PrefetchConfig, WriteConfig
from quire.engine.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.executor import RankConfig, open_executor
from quire.engine.messages import EngineInfo
from quire.engine.parallel import head_share
from quire.engine.scheduler import Scheduler
from quire.errors import MemoryBudgetError
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.memory.layout import PageLayout
from quire.memory.sizing import check_host_budget
from quire.models import ModelShape, describe, fingerprint
from quire.units import format_bytes
from quire.worker import ComponentConfig, WorkerConfig

Progress = Callable[[str, float], None]

_MAX_INFLIGHT_SHARE = 0.5
_MIN_DEVICE_PAGES = 4
_MIN_HOST_PAGES = 4


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Raises ModelError, ConfigError, MemoryBudgetError, WorkerError; nothing is left then."""
    tell = progress or (lambda _what, _done: None)
    directory = Path(config.model)
    shape = describe(directory)
    layouts = [_layout(config, shape, rank) for rank in range(config.tp)]
    device_pages, host_pages = _num_pages(config, layouts)
    tell("reading the weights", 0.0)
    print_of_weights = fingerprint(directory)
    tell("loading the model", 0.2)
    executor = open_executor(
        RankConfig(config.model, config.dtype, _threads(config)),
        [
            WorkerConfig(
                rank,
                config.tp,
                print_of_weights,
                [ComponentConfig(layout, device_pages, host_pages)],
                device=_device(config, rank),
            )
            for rank, layout in enumerate(layouts)
        ],
        lambda what, done: tell(what, 0.5 + done / 2),
    )
    try:
        manager = CacheManager(
            _cache_config(config, device_pages, host_pages), clock=time.monotonic
        )
        scheduler = Scheduler(
            manager,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            chunk_tokens=config.chunk_tokens,
            clock=time.monotonic,
        )
        limit = device_pages * config.page_size - 1
        max_context = min(shape.max_position_embeddings, config.max_context or limit, limit)
        engine = Engine(
            executor,
            manager,
            scheduler,
            Namespace(print_of_weights, config.dtype, config.page_size),
            page_bytes=sum(layout.page_bytes for layout in layouts),
            max_context=max_context,
            vocab_size=shape.vocab_size,
            debug=config.debug,
            clock=time.monotonic,
        )
        if config.store is not None:
            engine.attach_and_wait(config.store)
    except BaseException:
        executor.close()
        raise
    engine.info = EngineInfo(
        name=config.name,
        fingerprint=print_of_weights,
        device=config.device,
        dtype=config.dtype,
        tp=config.tp,
        page_size=config.page_size,
        vocab_size=shape.vocab_size,
        max_context=max_context,
        tiers=engine.tiers(),
        store=manager.store.url,
    )
    tell("ready", 1.0)
    return engine


def _layout(config: EngineConfig, shape: ModelShape, rank: int) -> PageLayout:
    first, last = head_share(shape, rank, config.tp)
    return PageLayout(
        "full", shape.num_layers, last - first, shape.head_dim, config.dtype, config.page_size
    )


def _num_pages(config: EngineConfig, layouts: list[PageLayout]) -> tuple[int, int]:
    """Device and host pages: the same number on every rank, so they fit the budgets together."""
    device_bytes = sum(layout.page_bytes for layout in layouts)
    host_bytes = sum(layout.page_stride_bytes for layout in layouts)
    device_pages = config.device_bytes // device_bytes
    host_pages = config.host_bytes // host_bytes
    if device_pages < _MIN_DEVICE_PAGES:
        raise MemoryBudgetError(
            f"device_memory of {format_bytes(config.device_bytes)} holds {device_pages} pages of "
            f"{format_bytes(device_bytes)}: give at least "
            f"{format_bytes(_MIN_DEVICE_PAGES * device_bytes)}, better many times that"
        )
    if config.host_bytes and host_pages < _MIN_HOST_PAGES:
        raise MemoryBudgetError(
            f"host_memory of {format_bytes(config.host_bytes)} holds {host_pages} pages of "
            f"{format_bytes(host_bytes)}: give at least "
            f"{format_bytes(_MIN_HOST_PAGES * host_bytes)}, or 0 for none"
        )
    on_cpu = config.device == "cpu"
    check_host_budget(
        host_pages * host_bytes + (device_pages * device_bytes if on_cpu else 0),
        what="the cache",
        option="device_memory and host_memory together" if on_cpu else "host_memory",
    )
    return device_pages, host_pages


def _cache_config(config: EngineConfig, device_pages: int, host_pages: int) -> CacheConfig:
    # Fetches may hold half of the host; a small host lowers the threshold with it.
    most = int(host_pages * _MAX_INFLIGHT_SHARE) * config.page_size
    threshold = max(1, min(config.prefetch_threshold, most)) if host_pages else 1
    write = WriteConfig(config.write_policy) if host_pages else WriteConfig()
    return CacheConfig(
        config.page_size,
        device_pages,
        host_pages,
        write=write,
        prefetch=PrefetchConfig(
            config.prefetch_policy,
            threshold_tokens=threshold,
            max_inflight_share=_MAX_INFLIGHT_SHARE,
        ),
        num_ranks=config.tp,
    )


def _device(config: EngineConfig, rank: int) -> str:
    return f"cuda:{rank}" if config.device == "cuda" else config.device


def _threads(config: EngineConfig) -> int:
    cores = len(os.sched_getaffinity(0))
    return config.threads or max(1, cores // config.tp)
