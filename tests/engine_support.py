"""A tiny model for tests of the engine: no weights, every page matters, every answer is known.

`SumModel` keeps one number per position in the pages, as a model keeps keys and values:

    x[p] = (token[p] · 31 + p + Σ x[j < p]) mod 4093        next token = (Σ x) mod 50

It reads the sum from the pages, so any wrong, missing or early page changes what follows. The
workers, pools, copies and stores around it are the real ones.
"""

import time
from collections.abc import Sequence

import numpy as np

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy, WriteConfig, WritePolicy
from quire.engine.batch import Batch, BatchResult, Segment, SegmentResult
from quire.engine.engine import Engine
from quire.engine.messages import Generate, Output, Outputs, SamplingParams
from quire.engine.sampling import Sampled
from quire.engine.scheduler import Scheduler
from quire.errors import WorkerError
from quire.keys import Namespace
from quire.manager import CacheManager
from quire.memory.layout import PageLayout
from quire.types import RequestId, page_array
from quire.worker import ComponentConfig, LocalWorkers, WorkerConfig, build_worker

PAGE = 4
MODULUS = 4093
VOCABULARY = 50
LAYOUT = PageLayout("full", 2, 1, 2, "float32", PAGE)


def oracle(prompt: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """What SumModel answers, computed without any page."""
    total = 0
    for position, token in enumerate(prompt):
        total += (token * 31 + position + total) % MODULUS
    answer: list[int] = []
    position = len(prompt)
    while len(answer) < num_tokens:
        token = total % VOCABULARY
        answer.append(token)
        if token in stop_ids:
            break
        total += (token * 31 + position + total) % MODULUS
        position += 1
    return answer


class SumModel:
    """An Executor of one rank."""

    def __init__(self, device_pages: int, host_pages: int, fingerprint: str = "sum") -> None:
        component = ComponentConfig(LAYOUT, device_pages, host_pages)
        self.worker = build_worker(WorkerConfig(0, 1, fingerprint, [component]))
        self.workers = LocalWorkers([self.worker])
        self.pool = self.worker.components["full"].device
        self.num_computed = 0
        """Tokens, over all batches."""
        self.fail_next = False

    def run(self, batch: Batch) -> BatchResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")
        return BatchResult(batch.number, [self._run(segment) for segment in batch.segments])

    def store_counters(self) -> dict[str, int]:
        return self.worker.store_counters()

    def close(self) -> None:
        self.worker.close()

    def _run(self, segment: Segment) -> SegmentResult:
        try:
            for op in segment.loads:
                for layer in range(LAYOUT.num_layers):
                    self.worker.wait_layer(op, layer)
        except WorkerError as error:
            return SegmentResult(failed=str(error))
        pages = page_array(segment.pages)
        assert len(set(pages.tolist())) == len(pages), "a page twice in one table"
        seen = [self.pool.v(layer)[pages.tolist()].flatten(0, 1) for layer in range(2)]
        total = int(seen[1][: segment.start, 0, 1].double().sum())
        for i, token in enumerate(np.frombuffer(segment.tokens, dtype="<i4").tolist()):
            position = segment.start + i
            x = (token * 31 + position + total) % MODULUS
            for layer in range(LAYOUT.num_layers):
                for plane in self.pool.planes(layer):
                    plane[int(pages[position // PAGE]), position % PAGE] = float(x)
            total += x
        self.num_computed += segment.num_tokens
        if segment.row is None:
            return SegmentResult()
        return SegmentResult(Sampled(token=total % VOCABULARY))


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
    ) -> None:
        self.clock = Clock()
        self.model = SumModel(device_pages, host_pages)
        config = CacheConfig(
            PAGE,
            device_pages,
            host_pages,
            write=WriteConfig(write),
            prefetch=PrefetchConfig(prefetch, threshold_tokens=PAGE, cost_model=False),
        )
        self.manager = CacheManager(config, clock=self.clock)
        self.scheduler = Scheduler(
            self.manager,
            max_running=max_running,
            max_waiting=max_waiting,
            chunk_tokens=chunk_tokens,
            clock=self.clock,
        )
        self.engine = Engine(
            self.model,
            self.manager,
            self.scheduler,
            Namespace("sum", "float32", PAGE),
            page_bytes=LAYOUT.page_bytes,
            max_context=device_pages * PAGE - 1,
            vocab_size=VOCABULARY,
            debug=True,
            clock=self.clock,
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
    ) -> RequestId:
        self._number += 1
        request = RequestId(f"r{self._number}")
        params = SamplingParams(max_tokens=num_tokens, temperature=0, stop_ids=list(stop_ids))
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
        """Until everything is answered and nothing is in flight."""
        for _ in range(100_000):
            if not len(self.scheduler) and self.manager.idle:
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
