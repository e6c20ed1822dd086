"""`quire demo`: one prompt through all tiers, with the real manager, worker and file store.

Only the model is missing. Its place is taken by `PretendPrefill`, which fills a page with bytes
derived from the page's key: so every page has one right content, and whatever tier a page came
from, its bytes can be checked. Times are those of the cache, not of a model.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy
from quire.errors import ConfigError, QuireError, StoreError
from quire.keys import Namespace, PrefixKey
from quire.manager import CacheManager, Lease, LoadState
from quire.memory.page_layout import PageLayout
from quire.memory.sizing import check_host_budget
from quire.progress import Progress
from quire.sizes import format_bytes
from quire.types import PageIds, RequestId, Tier, page_array, split_keys
from quire.worker import ComponentConfig, LocalWorkers, WorkerConfig, build_worker

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quire.memory.device import DevicePool

LAYOUT = PageLayout(
    "full", num_layers=6, num_kv_heads=3, head_dim=64, dtype="float32", page_size=16
)
"""SmolLM2's heads in a fifth of its layers."""
PROMPT_PAGES = 64
BROKEN_PAGE = 40
DEVICE_PAGES = 2 * PROMPT_PAGES
MODEL = "demo"
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """Where the pages of one prompt came from."""

    what: str
    device: int
    host: int
    store: int
    computed: int
    reuse_ms: float
    """From the arrival of the prompt until every reused page was on the device."""
    checked: int
    """Pages of the prompt whose bytes on the device were compared: all of them."""


@dataclass(slots=True)
class DemoReport:
    page_bytes: int
    served: list[Served] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"page_bytes": self.page_bytes, "served": [asdict(row) for row in self.served]}

    def renderables(self) -> list[RenderableType]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        size = format_bytes(PROMPT_PAGES * self.page_bytes)
        title = f"A prompt of {PROMPT_PAGES} pages ({size}): where it came from"
        table = Table(title=title, box=SIMPLE_HEAD)
        table.add_column("request")
        for name in ("device", "host", "store", "computed", "ms to reuse"):
            table.add_column(name, justify="right")
        for row in self.served:
            tiers = [row.device, row.host, row.store, row.computed]
            cells = [str(pages) if pages else "·" for pages in tiers]
            table.add_row(row.what, *cells, f"{row.reuse_ms:.1f}")
        checked = sum(row.checked for row in self.served)
        note = (
            "Computing is only pretended here (no model is run); times are the cache's: from the "
            "arrival of the prompt until every reused page was on the device."
        )
        return [table, note, f"All bytes were right: {checked} pages compared, none differed."]


def run(
    *,
    host_bytes: int = 64 << 20,
    directory: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> DemoReport:
    """Play all scenes. Raises ConfigError, MemoryBudgetError, StoreError; QuireError if a byte is
    wrong. Leaves nothing behind."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="quire-demo-", dir=directory))
    except OSError as error:
        raise StoreError(
            f"cannot put the demo's store into {str(directory)!r} ({error.strerror}): "
            "give --directory a directory that this user can write to"
        ) from error
    try:
        return _play(f"{folder.as_uri()}/store", folder / "store", host_bytes, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(url: str, folder: Path, host_bytes: int, progress: Progress) -> DemoReport:
    report = DemoReport(LAYOUT.page_bytes)
    prompt = _prompt(seed=1)

    def scene(engine: DemoEngine, what: str, key: PrefixKey = prompt) -> None:
        report.served.append(engine.serve(key, what))
        progress("demo", len(report.served), 8)

    with closing(DemoEngine(url, host_bytes)) as engine:
        scene(engine, "first time")
        scene(engine, "again")
        scene(engine, "shares half of it", _branch(prompt))
        engine.manager.flush(Tier.DEVICE)
        scene(engine, "device flushed")
        engine.manager.flush(Tier.DEVICE)
        engine.manager.flush(Tier.HOST)
        scene(engine, "device and host flushed")
    with closing(DemoEngine(url, host_bytes)) as engine:
        scene(engine, "restarted, same store")
    _damage(folder, prompt, BROKEN_PAGE)
    with closing(DemoEngine(url, host_bytes)) as engine:
        scene(engine, f"page {BROKEN_PAGE} is damaged")
    with closing(DemoEngine(url, host_bytes)) as engine:
        scene(engine, "restarted: it was repaired")
    return report


class DemoEngine:
    """What an engine would be, less the model: a manager, one worker, and the loop between."""

    def __init__(self, url: str, host_bytes: int) -> None:
        host_pages = host_bytes // LAYOUT.page_stride_bytes
        if host_pages < 2 * PROMPT_PAGES:
            least = format_bytes(2 * PROMPT_PAGES * LAYOUT.page_stride_bytes)
            raise ConfigError(f"--host-memory is too small for the demo: give at least {least}")
        check_host_budget(host_bytes, what="the demo", option="--host-memory")
        worker = build_worker(
            WorkerConfig(0, 1, MODEL, [ComponentConfig(LAYOUT, DEVICE_PAGES, host_pages)])
        )
        self._workers = LocalWorkers([worker])
        self._prefill = PretendPrefill(worker.components["full"].device)
        self.manager = CacheManager(
            CacheConfig(
                page_size=LAYOUT.page_size,
                device_pages=DEVICE_PAGES,
                host_pages=host_pages,
                prefetch=PrefetchConfig(policy=PrefetchPolicy.WAIT_COMPLETE),
            ),
            clock=time.monotonic,
        )
        change = self.manager.store.attach(url)
        self._until(lambda: change.done)
        if change.error:
            self.close()
            raise StoreError(change.error)

    def close(self) -> None:
        self._workers.close()

    def serve(self, key: PrefixKey, what: str) -> Served:
        """One request, from its arrival until everything it computed is safe in all tiers."""
        manager, started = self.manager, time.perf_counter()
        with manager.acquire(manager.match(key), RequestId(what)) as lease:
            prefetch = manager.prefetch(lease)
            self._until(lambda: manager.ready(lease))
            manager.admit(lease)
            device = lease.num_device
            reused = device + manager.load(lease)
            self._until(lambda: lease.load_state is not LoadState.LOADING)
            reuse_ms = (time.perf_counter() - started) * 1e3
            self._compute_rest(lease)
            checked = self._prefill.check(key, lease.pages)
            manager.commit(lease, key)
        self._until(lambda: manager.idle)
        manager.check_invariants()
        return Served(
            what=what,
            device=device,
            host=reused - device - prefetch.num_landed,
            store=prefetch.num_landed,
            computed=key.num_pages - reused,
            reuse_ms=reuse_ms,
            checked=checked,
        )

    def _compute_rest(self, lease: Lease) -> None:
        first, key = lease.num_device, lease.key
        if lease.load_state is LoadState.FAILED or not self.manager.extend(
            lease, key.num_pages - first
        ):
            raise QuireError("the demo's device could not take the prompt: please report this")
        self._prefill.compute(key, lease.pages, first)

    def _until(self, done: Callable[[], bool]) -> None:
        """The engine's loop: reports to the manager, commands to the workers."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            commands = self.manager.step(self._workers.poll())
            self._workers.submit(commands)
            if not commands and done():
                return
            if time.monotonic() > deadline:
                raise QuireError(f"the demo got no further for {PATIENCE_S:g} s: please report it")
            time.sleep(0.0002)


class PretendPrefill:
    """In place of a model: the content of a page follows from its key, and so from its prefix."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool

    def compute(self, key: PrefixKey, table: PageIds, first: int) -> None:
        """Fill the pages of `key` from page `first` on, at the places the page table names."""
        import torch

        pages, keys = page_array(table), split_keys(key.page_keys())
        for at in range(first, key.num_pages):
            content = torch.from_numpy(_content(keys[at]))
            for layer in range(LAYOUT.num_layers):
                for plane, tensor in enumerate(self._pool.planes(layer)):
                    tensor[int(pages[at])] = content[layer, plane]

    def check(self, key: PrefixKey, table: PageIds) -> int:
        """Compare every page of `key` on the device with what it must hold."""
        pages, keys = page_array(table), split_keys(key.page_keys())
        for at, page_key in enumerate(keys):
            content = _content(page_key)
            for layer in range(LAYOUT.num_layers):
                for plane, tensor in enumerate(self._pool.planes(layer)):
                    if not np.array_equal(tensor[int(pages[at])].numpy(), content[layer, plane]):
                        raise QuireError(f"page {at} holds wrong bytes in layer {layer}")
        return len(keys)


def _content(key: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[num_layers, num_planes, *inner]"""
    rng = np.random.default_rng(list(key))
    shape = (LAYOUT.num_layers, LAYOUT.num_planes, *LAYOUT.inner_shape)
    return rng.random(shape, dtype=np.float32)


def _prompt(seed: int) -> PrefixKey:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 49_152, PROMPT_PAGES * LAYOUT.page_size, dtype=np.int32)
    return PrefixKey(Namespace(MODEL, LAYOUT.dtype, LAYOUT.page_size), tokens)


def _branch(prompt: PrefixKey) -> PrefixKey:
    """The first half of a prompt, and a second half of its own."""
    half = PROMPT_PAGES // 2
    end = _prompt(seed=2).tokens[half * LAYOUT.page_size :]
    return PrefixKey(
        prompt.namespace, np.concatenate([prompt.tokens[: half * LAYOUT.page_size], end])
    )


def _damage(folder: Path, prompt: PrefixKey, page: int) -> None:
    """Flip one bit in the middle of a stored page."""
    name = split_keys(prompt.page_keys())[page].hex()
    (path,) = folder.glob(f"objects/*/{name}.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
