"""From an EngineConfig to an Engine: what a page weighs, how many there are, who holds them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from quire.components import PoolSize
from quire.config import CacheConfig, PrefetchConfig, SnapshotConfig, WriteConfig
from quire.engine.config import EngineConfig, ForwardKind, Role
from quire.engine.draft import check_target, open_speculation
from quire.engine.draft.heads import find_head, with_head
from quire.engine.engine import Engine, attach_and_wait, tiers
from quire.engine.executor import Executor, Model, RankConfig, open_executor
from quire.engine.forward import ForwardChoice, choose
from quire.engine.grammar import open_grammars
from quire.engine.kvevents.publisher import EventPublisher
from quire.engine.layouts import FULL, layouts
from quire.engine.lengths import DEFAULT_TOKENS, MeasuredLengths
from quire.engine.messages import EngineInfo
from quire.engine.neighbours import EnginePeering
from quire.engine.parallel import head_share
from quire.engine.pools import chunk_limit, components, plan_pools, running_limit
from quire.engine.queue import Queue
from quire.engine.scheduler import Scheduler
from quire.errors import ModelError
from quire.keys import UnitKind
from quire.manager import CacheManager
from quire.memory.page_layout import PageLayout
from quire.models import ModelShape, describe, fingerprint
from quire.progress import Share
from quire.sizes import format_bytes
from quire.worker import ComponentConfig, WorkerConfig

_logger = logging.getLogger(__name__)

_MAX_INFLIGHT_SHARE = 0.5
_EVENTS = 1 << 15
"""Kept for a router that asks which prefixes are here."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known before anything is opened."""

    config: EngineConfig
    shape: ModelShape
    ranks: list[list[PageLayout]]
    """By rank and component."""
    forward: ForwardChoice
    fingerprint: str
    """Of the model, and of its draft head if it has one."""
    lengths: MeasuredLengths | None
    sizes: Mapping[str, PoolSize]
    peering: EnginePeering | None
    head: Path | None
    """A draft head's directory."""

    @property
    def max_running(self) -> int:
        return running_limit(self.config, self.sizes)

    @property
    def chunk_tokens(self) -> int:
        return chunk_limit(self.config, self.shape, self.sizes)

    @property
    def max_context(self) -> int:
        config, (device_pages, host_pages) = self.config, self.sizes[FULL]
        limit = device_pages * config.page_size - 1
        if config.role is not Role.UNIFIED:  # what is handed over passes through the host whole
            limit = min(limit, host_pages * config.page_size)
        return min(self.shape.max_position_embeddings, config.max_context or limit, limit)


def build_engine(
    config: EngineConfig,
    progress: Share | None = None,
    between: Callable[[Executor], Executor] | None = None,
    model: Model | None = None,
) -> Engine:
    """`between`: what a benchmark puts between an engine and its ranks. `model`: of the only rank,
    if it is there already, and its pages have a size. Raises ModelError, ConfigError,
    MemoryBudgetError, WorkerError; nothing is left then."""
    tell = progress or (lambda _what, _done: None)
    tell("reading the weights", 0.0)
    plan = _plan(config)
    with ExitStack() as opened:
        tell("loading the model", 0.2)
        if model is None:
            plan, model = _tried(plan)
        executor = _open_executor(plan, model, lambda what, done: tell(what, 0.5 + done / 2))
        opened.callback(executor.close)
        executor = between(executor) if between is not None else executor
        engine = _assemble(plan, executor, opened)
        opened.pop_all()
    tell("ready", 1.0)
    return engine


def _plan(config: EngineConfig) -> _Plan:
    directory = Path(config.model)
    shape = describe(directory)
    forward = choose(directory, config.forward)
    no_dense = forward.reason or "forward says so" if forward.kind is not ForwardKind.DENSE else ""
    check_target(config.draft, shape, tp=config.tp, no_dense=no_dense)
    head = find_head(config.draft, config.name)
    ranks = [_layouts(config, shape, rank, head) for rank in range(config.tp)]
    if forward.reason:
        _logger.info("computed by transformers, not by our own decoder: %s", forward.reason)
    weights = fingerprint(directory)
    lengths = MeasuredLengths(weights) if len(ranks[0]) > 1 else None
    typical = config.typical_tokens or (lengths.typical_tokens if lengths else DEFAULT_TOKENS)
    sizes = plan_pools(config, shape, ranks, typical)
    if head is not None:
        weights = with_head(weights, head)
    peering = EnginePeering.of(config, shape, ranks[0], weights)
    return _Plan(config, shape, ranks, forward, weights, lengths, sizes, peering, head)


def _tried(plan: _Plan) -> tuple[_Plan, Model | None]:
    """With as much memory for pages as a trial of the model leaves, and the model; as it was where
    the memory is given, or where no trial would say enough."""
    config, shape = plan.config, plan.shape
    is_one = config.tp == 1 and list(plan.sizes) == [FULL]
    if not (config.measure_device and config.device == "cuda" and is_one):
        return plan, None
    from quire.engine.executor.trial import try_out

    longest = shape.max_position_embeddings
    model, room = try_out(
        _rank_config(plan),
        _worker_configs(plan)[0],
        max_context=min(longest, config.max_context or longest),
    )
    _logger.info("%s for pages, after a trial of the largest batch", format_bytes(room))
    config = msgspec.structs.replace(config, device_bytes=max(1, room), measure_device=False)
    sizes = plan_pools(config, shape, plan.ranks, DEFAULT_TOKENS)
    return replace(plan, config=config, sizes=sizes), model


def _open_executor(plan: _Plan, model: Model | None, progress: Share) -> Executor:
    return open_executor(_rank_config(plan), _worker_configs(plan), progress, model)


def _rank_config(plan: _Plan) -> RankConfig:
    config = plan.config
    return RankConfig(
        config.model,
        config.dtype,
        _threads(config),
        attention=config.attention,
        forward=plan.forward.kind,
        overlap=config.overlap,
        max_rows=_max_rows(plan),
        graph_batch=_graph_batch(config, plan.sizes),
        chunk_tokens=plan.chunk_tokens,
        head=str(plan.head or ""),
        max_drafts=config.max_rows - 1,
        branches=config.draft.branches,
    )


def _max_rows(plan: _Plan) -> int:
    """Tokens drawn in one step, at most: proposals never exceed the budget of a step."""
    most = max(plan.chunk_tokens, plan.max_running)
    return min(plan.max_running * plan.config.max_rows, most)


def _worker_configs(plan: _Plan) -> list[WorkerConfig]:
    config, sizes, peering = plan.config, plan.sizes, plan.peering
    return [
        WorkerConfig(
            rank,
            config.tp,
            plan.fingerprint,
            [ComponentConfig(layout, *sizes[layout.component]) for layout in own],
            device=_device(config, rank),
            copies=config.copies,
            peer=peering.serving(rank) if peering is not None else None,
        )
        for rank, own in enumerate(plan.ranks)
    ]


def _assemble(plan: _Plan, executor: Executor, opened: ExitStack) -> Engine:
    """Everything around the ranks, each part given what it needs when it is made."""
    config, clock, peering = plan.config, time.monotonic, plan.peering
    manager = CacheManager(
        _cache_config(config, *plan.sizes[FULL]),
        clock=clock,
        components=components(config, plan.shape, plan.sizes),
    )
    no_reuse = _self_check(plan, executor)
    if config.store is not None:
        attach_and_wait(manager, executor.workers, config.store, clock)
    queue = Queue(max_running=plan.max_running, max_waiting=config.max_waiting, clock=clock)
    others = None
    if peering is not None:
        others = peering.open(queue, manager, executor.workers.peer_addresses)
        opened.callback(others.hub.close)
    scheduler = Scheduler(
        manager,
        queue,
        chunk_tokens=plan.chunk_tokens,
        reuse=not no_reuse,
        remote=others.remote if others is not None else None,
        speculation=open_speculation(config.draft, config.draft_tokens),
        grammars=open_grammars(Path(config.model), plan.shape.vocab_size),
    )
    peer = others.hub.address if others is not None else ""
    info = _info(plan, manager, no_reuse=no_reuse, peer=peer)
    exchange = None
    if peering is not None and others is not None:
        exchange = peering.join(others, scheduler, manager, info)
    publisher = None
    if config.kv_events is not None:
        publisher = EventPublisher(config.kv_events, config.page_size)
    return Engine(
        executor,
        manager,
        scheduler,
        info,
        exchange=exchange,
        publisher=publisher,
        private_prefixes=config.role is Role.DECODE and not config.decode_cache,
        debug=config.debug,
        clock=clock,
        lengths=plan.lengths,
        audit=config.audit / 100,
        handed=peering.handed if peering is not None else None,
    )


def _self_check(plan: _Plan, executor: Executor) -> str:
    """Why nothing is reused; empty: all is well. Raises ModelError if it must be."""
    no_reuse, role = executor.self_check(), plan.config.role
    if no_reuse:
        print(f"REUSE IS OFF: {no_reuse}", file=sys.stderr, flush=True)
        if role is not Role.UNIFIED:
            raise ModelError(f"a {role.value} server hands on state, and {no_reuse}")
    return no_reuse


def _info(plan: _Plan, manager: CacheManager, *, no_reuse: str, peer: str) -> EngineInfo:
    config = plan.config
    page_bytes = {
        layout.component: sum(own[i].page_bytes for own in plan.ranks)
        for i, layout in enumerate(plan.ranks[0])
    }
    return EngineInfo(
        name=config.name,
        fingerprint=plan.fingerprint,
        device=config.device,
        dtype=config.dtype,
        tp=config.tp,
        page_size=config.page_size,
        vocab_size=plan.shape.vocab_size,
        max_context=plan.max_context,
        tiers=tiers(manager, page_bytes),
        store=manager.store.url,
        no_reuse=no_reuse,
        role=config.role.value,
        peer=peer,
        forward=plan.forward.kind,
        no_dense=plan.forward.reason,
        unit=UnitKind.TOKEN if plan.head is None else UnitKind.PAIR,
    )


def _layouts(
    config: EngineConfig, shape: ModelShape, rank: int, head: Path | None
) -> list[PageLayout]:
    first, last = head_share(shape, rank, config.tp)
    return layouts(
        shape,
        dtype=config.dtype,
        page_size=config.page_size,
        kv_heads=last - first,
        has_draft=head is not None,
    )


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
        tenant_share=config.tenant_share / 100,
        event_buffer=_EVENTS,
        event_tokens=config.kv_events is not None,
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
