"""From an EngineConfig to an Engine: what a page weighs, how many there are, who holds them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from quire.components import PoolSize
from quire.config import CacheConfig, PrefetchConfig, SnapshotConfig, WriteConfig
from quire.engine.config import EngineConfig, Role
from quire.engine.engine import Engine
from quire.engine.executor import RankConfig, open_executor
from quire.engine.forward import choose
from quire.engine.layouts import FULL, layouts
from quire.engine.messages import EngineInfo
from quire.engine.parallel import head_share
from quire.engine.peering import Peering
from quire.engine.pools import chunk_limit, components, plan_pools, running_limit
from quire.engine.scheduler import Scheduler
from quire.engine.usage import DEFAULT_TOKENS, Usage
from quire.errors import ModelError
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.memory.layout import PageLayout
from quire.models import ModelShape, describe, fingerprint
from quire.worker import ComponentConfig, WorkerConfig

Progress = Callable[[str, float], None]

_logger = logging.getLogger(__name__)

_MAX_INFLIGHT_SHARE = 0.5
_EVENTS = 1 << 15
"""Kept for a router that asks which prefixes are here."""


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Raises ModelError, ConfigError, MemoryBudgetError, WorkerError; nothing is left then."""
    tell = progress or (lambda _what, _done: None)
    directory = Path(config.model)
    shape = describe(directory)
    ranks = [_layouts(config, shape, rank) for rank in range(config.tp)]
    forward = choose(directory, config.forward)
    if forward.reason:
        _logger.info("computed by transformers, not by our own decoder: %s", forward.reason)
    tell("reading the weights", 0.0)
    print_of_weights = fingerprint(directory)
    usage = Usage(print_of_weights) if len(ranks[0]) > 1 else None
    typical = config.typical_tokens or (usage.typical_tokens if usage else DEFAULT_TOKENS)
    sizes = plan_pools(config, shape, ranks, typical)
    device_pages, host_pages = sizes[FULL]
    peering = Peering.of(config, shape, ranks[0], print_of_weights)
    tell("loading the model", 0.2)
    executor = open_executor(
        RankConfig(
            config.model,
            config.dtype,
            _threads(config),
            attention=config.attention,
            forward=forward.kind,
            overlap=config.overlap,
            max_rows=running_limit(config, sizes),
            graph_batch=_graph_batch(config, sizes),
            chunk_tokens=chunk_limit(config, shape, sizes),
        ),
        [
            WorkerConfig(
                rank,
                config.tp,
                print_of_weights,
                [ComponentConfig(layout, *sizes[layout.component]) for layout in own],
                device=_device(config, rank),
                copies=config.copies,
                peer=peering.serving(rank) if peering is not None else None,
            )
            for rank, own in enumerate(ranks)
        ],
        lambda what, done: tell(what, 0.5 + done / 2),
    )
    try:
        manager = CacheManager(
            _cache_config(config, device_pages, host_pages),
            clock=time.monotonic,
            components=components(config, shape, sizes),
        )
        no_reuse = executor.self_check()
        if no_reuse:
            print(f"REUSE IS OFF: {no_reuse}", file=sys.stderr, flush=True)
        scheduler = Scheduler(
            manager,
            max_running=running_limit(config, sizes),
            max_waiting=config.max_waiting,
            chunk_tokens=chunk_limit(config, shape, sizes),
            clock=time.monotonic,
            reuse=not no_reuse,
        )
        limit = device_pages * config.page_size - 1
        if config.role is not Role.UNIFIED:  # what is handed over passes through the host whole
            limit = min(limit, host_pages * config.page_size)
        max_context = min(shape.max_position_embeddings, config.max_context or limit, limit)
        engine = Engine(
            executor,
            manager,
            scheduler,
            Namespace(print_of_weights, config.dtype, config.page_size),
            page_bytes={
                layout.component: sum(own[i].page_bytes for own in ranks)
                for i, layout in enumerate(ranks[0])
            },
            max_context=max_context,
            vocab_size=shape.vocab_size,
            debug=config.debug,
            clock=time.monotonic,
            usage=usage,
        )
        if no_reuse and config.role is not Role.UNIFIED:
            raise ModelError(f"a {config.role.value} server hands on state, and {no_reuse}")
        engine.private_prefixes = config.role is Role.DECODE and not config.decode_cache
        if config.store is not None:
            engine.attach_and_wait(config.store)
        if peering is not None:
            engine.exchange = peering.join(
                engine,
                addresses=executor.workers.peer_addresses,
                vocab_size=shape.vocab_size,
                max_context=max_context,
            )
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
        no_reuse=no_reuse,
        role=config.role.value,
        peer=engine.exchange.hub.address if engine.exchange is not None else "",
        forward=forward.kind,
        no_dense=forward.reason,
    )
    tell("ready", 1.0)
    return engine


def _layouts(config: EngineConfig, shape: ModelShape, rank: int) -> list[PageLayout]:
    first, last = head_share(shape, rank, config.tp)
    return layouts(shape, dtype=config.dtype, page_size=config.page_size, kv_heads=last - first)


def _cache_config(config: EngineConfig, device_pages: int, host_pages: int) -> CacheConfig:
    # Fetches may hold half of the host; a small host lowers the threshold with it.
    most = int(host_pages * _MAX_INFLIGHT_SHARE) * config.page_size
    threshold = max(1, min(config.prefetch_threshold, most)) if host_pages else 1
    # What no request can ever find again is not worth a copy.
    keeps = config.role is not Role.DECODE or config.decode_cache
    write = WriteConfig(config.write_policy, enabled=keeps) if host_pages else WriteConfig()
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
        snapshots=SnapshotConfig(
            every_pages=-(-config.snapshot_every // config.page_size),
            per_path=config.snapshots_per_path,
        ),
        num_ranks=config.tp,
        event_buffer=_EVENTS if config.peer_port is not None else 0,
    )


def _device(config: EngineConfig, rank: int) -> str:
    return f"cuda:{rank}" if config.device == "cuda" else config.device


def _graph_batch(config: EngineConfig, sizes: Mapping[str, PoolSize]) -> int:
    """Ranks that add up their parts on the way are not captured."""
    wanted = config.cuda_graphs and config.device == "cuda" and config.tp == 1
    return running_limit(config, sizes) if wanted else 0


def _threads(config: EngineConfig) -> int:
    cores = len(os.sched_getaffinity(0))
    return config.threads or max(1, cores // config.tp)
