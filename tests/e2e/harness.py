"""A small engine over real workers and real stores, whose pages have a known right content.

`Engine` serves requests one by one or several at once; `prefill` stands in for a model: it writes
bytes that follow from the page's key and the rank. Every page table is compared with that before
it is used, on every rank whose memory this process can see.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy, WriteConfig
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager, LoadState
from quire.memory.page_layout import PageLayout
from quire.types import RequestId, Tier, page_array, split_keys
from quire.worker import ComponentConfig, LocalWorkers, WorkerConfig, open_workers

PAGE = 4
LAYOUT = PageLayout(
    "full", num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE
)
NAMESPACE = Namespace("m", "float32", PAGE)
PATIENCE_S = 60.0
"""Only how long a broken test takes to fail."""


def doc(pages: int, seed: int, shared: PrefixKey | None = None) -> PrefixKey:
    """A random prompt of so many pages, behind those of `shared` if given."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, pages * PAGE, dtype=np.int32)
    head = [] if shared is None else [shared.tokens]
    return PrefixKey(NAMESPACE, np.concatenate([*head, tokens]))


def content(key: bytes, rank: int) -> np.ndarray:
    """[num_layers, num_planes, *inner]: what this page must hold on this rank."""
    rng = np.random.default_rng([*key, rank])
    return rng.random((LAYOUT.num_layers, LAYOUT.num_planes, *LAYOUT.inner_shape), dtype=np.float32)


class Request:
    """One request on its way: `advance` does what can be done without waiting."""

    def __init__(self, engine: "Engine", key: PrefixKey, name: str) -> None:
        self.engine = engine
        self.key = key
        self.name = name
        self.restarts = 0
        self.done = False
        self._begin()

    def _begin(self) -> None:
        manager = self.engine.manager
        self.loading = False
        self.lease = manager.acquire(manager.match(self.key), RequestId(self.name))
        self.prefetch = manager.prefetch(self.lease)

    def advance(self) -> None:
        manager, lease = self.engine.manager, self.lease
        if not self.loading:
            if not manager.ready(lease):
                return
            manager.admit(lease)
            self.on_device = lease.num_device
            manager.load(lease)
            self.loading = True
        if lease.load_state is LoadState.LOADING:
            return
        if lease.load_state is LoadState.FAILED:
            manager.release(lease)
            self.restarts += 1
            assert self.restarts < 100
            self._begin()
            return
        self._finish()

    def _finish(self) -> None:
        manager, lease = self.engine.manager, self.lease
        self.reused = lease.num_device
        assert manager.extend(lease, self.key.num_pages - self.reused)
        self.engine.check(self.key, lease.pages, 0, self.reused)
        self.engine.prefill(self.key, lease.pages, self.reused)
        manager.commit(lease, self.key)
        self.engine.check(self.key, lease.pages, 0, self.key.num_pages)
        manager.release(lease)
        self.done = True

    @property
    def origin(self) -> tuple[int, int, int, int]:
        """Pages from (device, host, store, computed)."""
        store = self.prefetch.num_landed
        host = self.reused - self.on_device - store
        return self.on_device, host, store, self.key.num_pages - self.reused


class Engine:
    def __init__(
        self,
        url: str = "",
        *,
        ranks: int = 1,
        processes: bool = False,
        device: int = 48,
        host: int = 96,
        model: str = "m",
        policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        write: WriteConfig | None = None,
    ) -> None:
        component = ComponentConfig(LAYOUT, device, host)
        configs = [WorkerConfig(rank, ranks, model, [component]) for rank in range(ranks)]
        self.workers = open_workers(configs, processes=processes)
        self.manager = CacheManager(
            CacheConfig(
                page_size=PAGE,
                device_pages=device,
                host_pages=host,
                num_ranks=ranks,
                prefetch=PrefetchConfig(policy=policy, threshold_tokens=2 * PAGE, cost_model=False),
                write=write or WriteConfig(retry_delay_s=0.005),
            ),
            clock=time.monotonic,
        )
        self._numbers = 0
        self.checked_pages = 0
        if url:
            change = self.manager.store.attach(url)
            self.until(lambda: change.done)
            assert change.error == "", change.error

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.workers.close()

    # ---- the loop -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Reports in, commands out. True if anything happened."""
        reports = self.workers.poll()
        commands = self.manager.step(reports)
        self.workers.submit(commands)
        return bool(reports or commands)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.step() or not done():
            assert time.monotonic() < deadline, "it never came to rest"
            time.sleep(0.0005)

    def settle(self) -> None:
        """Until nothing is in flight and no write is waiting to be tried again."""
        self.until(lambda: self.manager.idle and self.manager.next_wakeup() is None)
        self.manager.check_invariants()

    # ---- requests -------------------------------------------------------------------------------

    def start(self, key: PrefixKey) -> Request:
        self._numbers += 1
        return Request(self, key, f"r{self._numbers}")

    def serve_all(self, keys: list[PrefixKey]) -> list[Request]:
        """All at once, advancing each as soon as it can go on."""
        requests = [self.start(key) for key in keys]

        def all_done() -> bool:
            for request in requests:
                if not request.done:
                    request.advance()
            return all(request.done for request in requests)

        self.until(all_done)
        return requests

    def serve(self, key: PrefixKey) -> tuple[int, int, int, int]:
        """One request to its end, and everything after it; pages by origin."""
        (request,) = self.serve_all([key])
        self.settle()
        return request.origin

    def flush(self, *tiers: Tier) -> None:
        for tier in tiers:
            self.manager.flush(tier)

    def assert_all_pages_come_back(self) -> None:
        self.settle()
        assert not self.manager.leases
        self.flush(Tier.DEVICE, Tier.HOST)
        for tier in Tier:
            allocator = self.manager._core.allocators[tier]
            assert allocator.num_free == allocator.num_pages, tier.name
        self.manager.check_invariants()

    # ---- bytes ----------------------------------------------------------------------------------

    def prefill(self, key: PrefixKey, table: bytes, first: int) -> None:
        """The stand-in for a model: pages [first, end) get their content, on every local rank."""
        for rank, page_key, page in self._pages(key, table, first, key.num_pages):
            pool = self.workers.workers[rank].components["full"].device
            wanted = torch.from_numpy(content(page_key, rank))
            for layer in range(LAYOUT.num_layers):
                for plane, tensor in enumerate(pool.planes(layer)):
                    tensor[page] = wanted[layer, plane]

    def check(self, key: PrefixKey, table: bytes, first: int, last: int) -> None:
        for rank, page_key, page in self._pages(key, table, first, last):
            pool = self.workers.workers[rank].components["full"].device
            wanted = content(page_key, rank)
            for layer in range(LAYOUT.num_layers):
                for plane, tensor in enumerate(pool.planes(layer)):
                    assert np.array_equal(tensor[page].numpy(), wanted[layer, plane])
            self.checked_pages += 1

    def _pages(self, key: PrefixKey, table: bytes, first: int, last: int):
        if not isinstance(self.workers, LocalWorkers):
            return  # the memory of other processes cannot be seen from here
        pages, keys = page_array(table), split_keys(key.page_keys())
        for rank in range(self.workers.num_ranks):
            for at in range(first, last):
                yield rank, keys[at], int(pages[at])
