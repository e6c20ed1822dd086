"""WorkerConfig: everything a worker is built from, small enough to travel to another process.

Knows no torch until `build_worker` is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from quire.errors import ConfigError
from quire.memory.page_layout import PageLayout
from quire.memory.sizing import check_host_budget
from quire.peer.identity import Identity
from quire.peer.kinds import TransportKind
from quire.store import open_pages
from quire.transfer.kinds import MoverKind

if TYPE_CHECKING:
    from quire.progress import Count
    from quire.worker.worker import CacheWorker, ComponentPools


class IoLimits(msgspec.Struct, frozen=True):
    """Bounds of a worker's I/O."""

    probe_threads: int = 1
    fetch_threads: int = 8
    """A long fetch may have all of them, if nobody else fetches."""
    write_threads: int = 4
    peer_threads: int = 4
    """For each peer."""
    max_peer_lanes: int = 16
    """Peers that have threads of their own; more share them."""
    max_queued: int = 4096
    """Operations waiting per lane; more are turned away at once."""
    max_touches: int = 256
    """Reports of use waiting; more are dropped."""
    batch_pages: int = 16
    """Pages per call of the store, which moves them together: the grain of progress reports,
    cancellation and fairness."""
    peer_batch_pages: int = 64
    peer_batch_bytes: int = 16 << 20
    """The same for a peer, which is asked by one thread at a time: so many pages, or as many as
    have so many bytes."""
    close_timeout_s: float = 10.0
    """How long close() waits for a thread that is inside a store."""

    def __post_init__(self) -> None:
        for name in set(self.__struct_fields__) - {"close_timeout_s"}:
            if getattr(self, name) < 1:
                raise ConfigError(f"io.{name} is {getattr(self, name)}: it must be at least 1")


class ComponentConfig(msgspec.Struct, frozen=True):
    layout: PageLayout
    device_pages: int
    host_pages: int


class PeerServing(msgspec.Struct, frozen=True):
    """What a worker needs to exchange pages with the workers of other engines."""

    secret: str
    epoch: str
    """Of this engine's life; the same for all its ranks."""
    identity: Identity
    heads: dict[str, tuple[int, int]]
    """By component: [first, last) of the model's heads that this rank holds. What has no heads has
    one, (0, 1)."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    ticket_key: bytes = b""
    """Of this engine's life; the same for all its ranks and their leader, and nobody else's."""
    transport: TransportKind = TransportKind.AUTO

    def __repr__(self) -> str:
        return f"PeerServing({self.host}:{self.port}, heads={self.heads})"  # no secret in logs


class WorkerConfig(msgspec.Struct, frozen=True):
    rank: int
    num_ranks: int
    model_fingerprint: str
    """Of the weights, not only of the name."""
    components: list[ComponentConfig]
    device: str = "cpu"
    copies: MoverKind = MoverKind.AUTO
    """What moves pages between a CUDA device and the host."""
    io: IoLimits = IoLimits()
    peer: PeerServing | None = None
    """None: pages are not exchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ConfigError(f"rank {self.rank} is not one of {self.num_ranks} ranks")
        names = [component.layout.component for component in self.components]
        if len(set(names)) != len(names):
            raise ConfigError(f"components {names} name one twice: give each its own layout")
        if self.peer is not None:
            _check_heads(self.peer, self.components)

    @property
    def host_bytes(self) -> int:
        """Main memory this worker will take: its host pools, and its device pools on a CPU."""
        host = sum(c.host_pages * c.layout.page_stride_bytes for c in self.components)
        if self.device != "cpu":
            return host
        return host + sum(c.device_pages * c.layout.page_bytes for c in self.components)


def _check_heads(peer: PeerServing, components: list[ComponentConfig]) -> None:
    for component in components:
        layout = component.layout
        first, last = peer.heads.get(layout.component, (0, 0))
        if first < 0 or last - first != layout.num_kv_heads:
            raise ConfigError(
                f"peer.heads of '{layout.component}' is [{first}, {last}), but its layout has "
                f"{layout.num_kv_heads} heads: name the heads that this rank holds"
            )


def build_worker(
    config: WorkerConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: Count | None = None,
) -> CacheWorker:
    """Allocate the pools and start the threads. Raises ConfigError, MemoryBudgetError."""
    from quire.worker.worker import CacheWorker

    check_host_budget(config.host_bytes, what=f"worker {config.rank}", option="host_pages")
    components: dict[str, ComponentPools] = {}
    with ExitStack() as undo:
        for component in config.components:
            pools = _pools(component, config, progress)
            components[component.layout.component] = pools
            undo.callback(pools.close)
        worker = CacheWorker(
            config.rank,
            config.num_ranks,
            components,
            model_fingerprint=config.model_fingerprint,
            open_store=lambda url: open_pages(url, clock=clock),
            limits=config.io,
            peer=config.peer,
            clock=clock,
        )
        undo.pop_all()
    return worker


def _pools(
    component: ComponentConfig, config: WorkerConfig, progress: Count | None
) -> ComponentPools:
    import torch

    from quire.memory.device import DevicePool
    from quire.memory.host import HostPool
    from quire.transfer import open_copy_engine
    from quire.worker.worker import ComponentPools

    where = torch.device(config.device)
    device_pool = DevicePool.allocate(component.layout, component.device_pages, where)
    host_pool = HostPool(
        component.layout,
        component.host_pages,
        pin_for=device_pool.device if where.type == "cuda" else None,
        is_shared=config.peer is not None and config.peer.transport.shares_memory,
        progress=progress,
    )
    try:
        engine = open_copy_engine(device_pool, host_pool, config.copies)
        return ComponentPools(device_pool, host_pool, engine)
    except BaseException:
        host_pool.close()
        raise
