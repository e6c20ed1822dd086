"""A tiny model for tests of the engine: no weights, every page matters, every answer is known.

`SumModel` keeps one number per position in the pages, as a model keeps keys and values; in a mix
with a window also those of the last WINDOW positions, and with recurrence a state r:

    x[p] = (token[p] · 31 + p + s) mod 4093     s = Σ x[j < p] + 3 · Σ x[p - WINDOW < j < p] + 5r
    r'   = (7r + x[p]) mod 4093                 next token = s mod 50

It reads the sums from the pages and the state from its slot, so any wrong, missing or early page
changes what follows. The workers, pools, copies and stores around it are the real ones.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.components import Component, FullAttention, PoolSize, Recurrent, SlidingWindow
from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy, WriteConfig, WritePolicy
from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult, verified
from quire.engine.draft.speculation import Speculation
from quire.engine.engine import Engine, tiers
from quire.engine.executor.local import difference
from quire.engine.grammar import Grammars
from quire.engine.messages import EngineInfo, Generate, Output, Outputs, SamplingParams
from quire.engine.queue import Queue
from quire.engine.sampling import Sampled
from quire.engine.scheduler import Scheduler
from quire.errors import WorkerError
from quire.manager import CacheManager, Way
from quire.memory.page_layout import PageLayout
from quire.store.account import StoreAccount
from quire.types import NO_SLOT, RequestId, page_array
from quire.worker import ComponentConfig, LocalWorkers, WorkerConfig, build_worker

PAGE = 4
MODULUS = 4093
VOCABULARY = 50
WINDOW = 10
MIXES = ("full", "full+window", "full+recurrent", "full+window+recurrent")
LAYOUT = PageLayout("full", 2, 1, 2, "float32", PAGE)
LAYOUTS = {
    "full": LAYOUT,
    "window": PageLayout("window", 2, 1, 2, "float32", PAGE),
    "recurrent": PageLayout("recurrent", 1, 1, 16, "uint8", 1, num_planes=1),
}


def oracle(
    prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = (), mix: str = "full"
) -> list[int]:
    """What SumModel answers, computed without any page."""
    xs: list[int] = []
    state = total = 0
    answer: list[int] = []

    def seen() -> int:
        window = sum(xs[1 - WINDOW :]) if "window" in mix else 0
        return total + 3 * window + 5 * (state if "recurrent" in mix else 0)

    tokens = list(prompt)
    while True:
        position = len(xs)
        if position == len(tokens):
            token = seen() % VOCABULARY
            answer.append(token)
            if len(answer) == num_tokens or token in stop_ids:
                return answer
            tokens.append(token)
        x = (tokens[position] * 31 + position + seen()) % MODULUS
        xs.append(x)
        total += x
        state = (7 * state + x) % MODULUS


class SumModel:
    """An Executor of one rank."""

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        fingerprint: str = "sum",
        components: Sequence[Component] = (FullAttention(),),
        overlaps: bool = False,
    ) -> None:
        self.overlaps = overlaps
        full = PoolSize(device_pages, host_pages)
        configs = [ComponentConfig(LAYOUTS[c.name], *(c.pool or full)) for c in components]
        self.worker = build_worker(WorkerConfig(0, 1, fingerprint, configs))
        self.workers = LocalWorkers([self.worker])
        self.pools = {name: pools.device for name, pools in self.worker.components.items()}
        self.num_computed = 0
        """Tokens, over all batches."""
        self.fail_next = ""
        """At `launch` or at `collect`."""
        self._landing: deque[BatchResult] = deque()
        self._drawn: list[int] = []
        """By the last batch launched, one per row."""

    def launch(self, batch: Batch) -> None:
        self._fail("launch")
        result = self._run_all(batch)
        self._landing.append(result)
        rows = zip(batch.segments, result.results, strict=True)
        self._drawn = [r.sampled.token if r.sampled else 0 for s, r in rows if s.row is not None]

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        result = self._landing.popleft()
        self._fail("collect")
        return result

    def _fail(self, where: str) -> None:
        if self.fail_next == where:
            self.fail_next = ""
            raise RuntimeError("out of luck")

    def _run_all(self, batch: Batch) -> BatchResult:
        own = [s.state for s in batch.segments if s.state != NO_SLOT]
        own += [s.save for s in batch.segments if s.save != NO_SLOT]
        assert len(own) == len(set(own)), "two requests write one slot"
        assert not set(own) & {s.restore for s in batch.segments}, "a snapshot is written"
        return BatchResult(batch.number, [self._run(segment) for segment in batch.segments])

    def difference(self, page: int, other: int) -> float:
        return difference(self.pools["full"], page, other)

    def self_check(self) -> str:
        return ""

    def store_account(self) -> StoreAccount:
        return self.worker.store_account()

    def close(self) -> None:
        self.worker.close()

    def _run(self, segment: Segment) -> SegmentResult:
        try:
            for op in segment.loads:
                for name in self.pools:
                    for layer in range(LAYOUTS[name].num_layers):
                        self.worker.wait_layer(op, layer, name)
        except WorkerError as error:
            return SegmentResult(failed=str(error))
        start = segment.start
        full = _Numbers(self.pools["full"], segment.pages, 0)
        total = sum(full.read(0, start))
        window = None
        if "window" in self.pools:
            window = _Numbers(self.pools["window"], segment.window, segment.window_first)
        state = self._restored(segment)
        tokens = np.frombuffer(segment.tokens, dtype="<i4").tolist()
        if segment.follows >= 0:
            tokens = [self._drawn[segment.follows]]
        first_draw = start + segment.num_tokens - segment.num_rows
        drawn: list[Sampled] = []
        for position, token in enumerate(tokens, start):
            recent = sum(window.read(max(0, position - WINDOW + 1), position)) if window else 0
            x = (token * 31 + position + total + 3 * recent + 5 * state) % MODULUS
            if segment.is_there and position == start:
                assert list(full.read(position, position + 1)) == [x], "others read another one"
            else:
                full.write(position, x)
            if window is not None:
                window.write(position, x)
            total += x
            if "recurrent" in self.pools:
                state = (7 * state + x) % MODULUS
            if position >= first_draw:
                end = position + 1
                recent = sum(window.read(max(0, end - WINDOW + 1), end)) if window else 0
                drawn.append(_pick(segment, len(drawn), total + 3 * recent + 5 * state))
        self._keep(segment, state)
        self.num_computed += segment.num_tokens
        return verified(segment, drawn) if drawn else SegmentResult()

    def _restored(self, segment: Segment) -> int:
        if "recurrent" not in self.pools:
            return 0
        assert segment.state != NO_SLOT
        if segment.restore == NO_SLOT and segment.start == 0:
            return 0
        return int(self._slot(segment.state if segment.restore == NO_SLOT else segment.restore)[1])

    def _keep(self, segment: Segment, state: int) -> None:
        for slot in (segment.state, segment.save):
            if slot != NO_SLOT:
                self._slot(slot)[:] = float(state)

    def _slot(self, slot: int) -> torch.Tensor:
        return self.pools["recurrent"].planes(0)[0][slot].flatten().view(torch.float32)


def _pick(segment: Segment, number: int, value: int) -> Sampled:
    """The token of a draw: what the grammar allows, if there is one."""
    assert segment.row is not None
    mask = ([segment.row.allowed, *segment.allowed] + [b""] * segment.drafts)[number]
    if not mask:
        return Sampled(token=value % VOCABULARY)
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    if not len(allowed):
        return Sampled(token=0, error="nothing may come")
    return Sampled(token=int(allowed[value % len(allowed)]))


class _Numbers:
    """One sequence's numbers in the pages of a pool, from page `first` on."""

    def __init__(self, pool, pages, first: int) -> None:
        self._pool = pool
        self._pages = page_array(pages).tolist()
        self._first = first
        assert len(set(self._pages)) == len(self._pages), "a page twice in one table"

    def read(self, start: int, end: int) -> list[int]:
        return [int(self._pool.v(1)[self._at(p)][0, 1]) for p in range(start, end)]

    def write(self, position: int, x: int) -> None:
        for layer in range(2):
            for plane in self._pool.planes(layer):
                plane[self._at(position)] = float(x)

    def _at(self, position: int) -> tuple[int, int]:
        index = position // PAGE - self._first
        assert index >= 0, f"position {position} is before the table"
        return self._pages[index], position % PAGE


class Clock:
    """Real time, and as much more as a test wants."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class TinyEngine:
    """An Engine around SumModel."""

    def __init__(
        self,
        *,
        device_pages: int = 64,
        host_pages: int = 128,
        chunk_tokens: int = 16,
        max_running: int = 8,
        max_waiting: int = 64,
        store: str | None = None,
        write: WritePolicy = WritePolicy.WRITE_THROUGH,
        prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        mix: str = "full",
        device_slots: int = 24,
        host_slots: int = 24,
        reuse: bool = True,
        ahead: bool = False,
        way: Way | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        audit: float = 0.0,
    ) -> None:
        """`ahead`: batches are chosen before those ahead of them are taken in. `way`: to what the
        store has, always."""
        self.clock = Clock()
        pool, slots = PoolSize(device_pages, host_pages), PoolSize(device_slots, host_slots)
        components: list[Component] = [FullAttention()]
        if "window" in mix:
            components.append(SlidingWindow(len(components), WINDOW, PAGE, pool))
        if "recurrent" in mix:
            components.append(Recurrent(len(components), slots))
        self.model = SumModel(device_pages, host_pages, components=components, overlaps=ahead)
        config = CacheConfig(
            PAGE,
            device_pages,
            host_pages,
            write=WriteConfig(write),
            prefetch=PrefetchConfig(prefetch, threshold_tokens=PAGE, cost_model=False),
        )
        self.manager = CacheManager(config, clock=self.clock, components=components)
        self.manager.costs.force(way)
        queue = Queue(max_running=max_running, max_waiting=max_waiting, clock=self.clock)
        self.scheduler = Scheduler(
            self.manager,
            queue,
            chunk_tokens=chunk_tokens,
            reuse=reuse,
            speculation=speculation,
            grammars=grammars,
        )
        page_bytes = {name: layout.page_bytes for name, layout in LAYOUTS.items()}
        info = EngineInfo(
            name="sum",
            fingerprint="sum",
            device="cpu",
            dtype="float32",
            tp=1,
            page_size=PAGE,
            vocab_size=VOCABULARY,
            max_context=device_pages * PAGE - 1,
            tiers=tiers(self.manager, page_bytes),
            store="",
        )
        self.engine = Engine(
            self.model,
            self.manager,
            self.scheduler,
            info,
            debug=True,
            clock=self.clock,
            audit=audit,
        )
        if store is not None:
            self.engine.attach_and_wait(store)
        self.outputs: list[Output] = []
        self._number = 0

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        salt: str = "",
        priority: int = 0,
        timeout_s: float = 600.0,
        stop_ids: Sequence[int] = (),
        grammar: str = "",
        told: Sequence[int] = (),
    ) -> RequestId:
        self._number += 1
        request = RequestId(f"r{self._number}")
        params = SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            stop_ids=list(stop_ids),
            grammar=grammar,
            told=list(told),
        )
        tokens = np.array(prompt, dtype="<i4").tobytes()
        self.engine.handle(Generate(request, tokens, params, salt, priority, timeout_s))
        self._collect()
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if not self.engine.step():
                time.sleep(0.0005)
            self._collect()

    def run(self) -> None:
        """Until everything is answered, nothing is in flight, and no write waits to be tried
        again."""
        for _ in range(100_000):
            waits = len(self.scheduler) or any(
                writes.retries for writes in self.manager._writer._writes
            )
            if not waits and self.manager.idle:
                return
            self.step()
        raise AssertionError(f"stuck: {self.engine.status()}")

    def answer(self, prompt: Sequence[int], num_tokens: int, **options) -> list[int]:
        request = self.ask(prompt, num_tokens, **options)
        self.run()
        assert self.last(request).finish is not None
        assert not self.last(request).error, self.last(request).error
        return self.tokens(request)

    def of(self, request: RequestId) -> list[Output]:
        return [output for output in self.outputs if output.id == request]

    def last(self, request: RequestId) -> Output:
        return self.of(request)[-1]

    def tokens(self, request: RequestId) -> list[int]:
        return [token for output in self.of(request) for token in output.tokens]

    def cached(self, request: RequestId):
        return next(output.cached for output in self.of(request) if output.cached is not None)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "TinyEngine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _collect(self) -> None:
        for message in self.engine.take_messages():
            if isinstance(message, Outputs):
                self.outputs += message.outputs
