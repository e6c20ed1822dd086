"""PacedEngine: the real engine in virtual time, over a model and a store of given speeds.

No bytes are moved and no token means anything: what is looked at is how long a prompt takes. The
store and the copies carry one page after the other; the model computes meanwhile, one batch after
the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.config import CacheConfig, PrefetchConfig, PrefetchPolicy
from quire.engine.batch import Batch, BatchResult, SegmentResult
from quire.engine.engine import Engine, tiers
from quire.engine.messages import CachedTokens, EngineInfo, Generate, Outputs, SamplingParams
from quire.engine.queue import Queue
from quire.engine.sampling import Sampled
from quire.engine.scheduler import Scheduler
from quire.manager import CacheManager, Way
from quire.messages import Cancel, Command, Completion, Fetch, Load, Transferred
from quire.sim.bandwidth import SimLane, SimPassage
from quire.sim.clock import VirtualClock
from quire.store.account import StoreAccount
from quire.types import OperationId, RequestId, Tier
from quire.worker.instant import InstantWorker

PAGE = 16
VOCABULARY = 1000
_LOOK_S = 1e-3
"""Between two looks at the workers while a batch is computed."""
_TICK_S = 1e-4
"""Between two looks when there is nothing to compute."""


@dataclass(frozen=True, slots=True)
class Speeds:
    compute_s: float
    """Of a page, by the model."""
    fetch_s: float
    """Of a page, from the store."""
    load_s: float
    batch_s: float = 0.001
    """Of a batch, whatever is in it."""
    chunk_pages: int = 16
    overlaps: bool = False
    """As on an accelerator: batches are launched ahead, and workers heard while one is computed."""


@dataclass(slots=True)
class PacedWorkers:
    """One rank: fetches and loads take their time."""

    clock: VirtualClock
    speeds: Speeds
    num_ranks: int = 1
    _instant: InstantWorker = field(default_factory=InstantWorker)
    _moving: dict[OperationId, tuple[SimPassage, Transferred]] = field(default_factory=dict)
    _reports: list[Completion] = field(default_factory=list)
    _store: SimLane = field(init=False)
    _copies: SimLane = field(init=False)

    def __post_init__(self) -> None:
        self._store = SimLane(self.clock, 1 / self.speeds.fetch_s)
        self._copies = SimLane(self.clock, 1 / self.speeds.load_s)

    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._begin(command)

    def poll(self) -> list[Completion]:
        reports, self._reports = self._reports, []
        for op, (passage, report) in list(self._moving.items()):
            if passage.left_s() <= 0:
                del self._moving[op]
                reports.append(report)
        return reports

    def left_s(self, op: OperationId) -> float:
        return self._moving[op][0].left_s() if op in self._moving else 0.0

    def next_s(self) -> float | None:
        """Until something ends."""
        return min((passage.left_s() for passage, _ in self._moving.values()), default=None)

    def _begin(self, command: Command) -> None:
        if isinstance(command, Cancel):
            if command.op in self._moving:
                passage, cut = self._moving.pop(command.op)
                passage.leave()
                lost = bytes([1]) * len(cut.statuses)
                self._reports.append(Transferred(cut.op, 0, cut.component, 0, lost, True))
            return
        report = self._instant.answer_one(command)
        if isinstance(command, Fetch | Load) and isinstance(report, Transferred):
            lane = self._store if isinstance(command, Fetch) else self._copies
            passage = SimPassage([(lane, lane.enter(len(report.statuses)))])
            self._moving[command.op] = passage, report
        elif report is not None:
            self._reports.append(report)


class PacedModel:
    """An executor."""

    def __init__(self, clock: VirtualClock, speeds: Speeds) -> None:
        self.overlaps = speeds.overlaps
        self.workers = PacedWorkers(clock, speeds)
        self._clock = clock
        self._speeds = speeds
        self._launched: deque[Batch] = deque()

    def launch(self, batch: Batch) -> None:
        self._launched.append(batch)

    def collect(self, meanwhile: Callable[[], None]) -> BatchResult:
        batch = self._launched.popleft()
        loads = [op for segment in batch.segments for op in segment.loads]
        self._clock.advance(max((self.workers.left_s(op) for op in loads), default=0.0))
        left_s = self._speeds.batch_s + batch.num_tokens / PAGE * self._speeds.compute_s
        while left_s > 0:
            some_s = min(left_s, _LOOK_S if self.overlaps else left_s)
            self._clock.advance(some_s)
            left_s -= some_s
            meanwhile()
        sampled = [Sampled(token=0) if s.row is not None else None for s in batch.segments]
        return BatchResult(batch.number, [SegmentResult(token) for token in sampled])

    def store_account(self) -> StoreAccount:
        return StoreAccount()

    def close(self) -> None:
        pass


class PacedEngine:
    def __init__(self, speeds: Speeds, *, pages: int, way: Way | None = None) -> None:
        """For prompts of so many pages."""
        self.clock = VirtualClock()
        self.model = PacedModel(self.clock, speeds)
        room = 3 * pages
        prefetch = PrefetchConfig(PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=PAGE)
        config = CacheConfig(PAGE, room, 2 * room, prefetch=prefetch)
        self.manager = CacheManager(config, clock=self.clock)
        queue = Queue(max_running=4, max_waiting=16, clock=self.clock)
        scheduler = Scheduler(self.manager, queue, chunk_tokens=speeds.chunk_pages * PAGE)
        info = EngineInfo(
            name="paced",
            fingerprint="paced",
            device="none",
            dtype="float32",
            tp=1,
            page_size=PAGE,
            vocab_size=VOCABULARY,
            max_context=room * PAGE - 1,
            tiers=tiers(self.manager, {"full": 1}),
            store="",
        )
        self.engine = Engine(self.model, self.manager, scheduler, info, clock=self.clock)  # type: ignore[arg-type]
        self.manager.store.attach("paced://")
        self._num_asked = 0
        self.settle()
        self._learn(pages)
        self.manager.costs.force(way)

    def first_token_s(self, prompt: Sequence[int]) -> tuple[float, CachedTokens]:
        """From asking until it came."""
        self._num_asked += 1
        name, began = RequestId(f"r{self._num_asked}"), self.clock()
        tokens = np.array(prompt, dtype="<i4").tobytes()
        self.engine.handle(Generate(name, tokens, SamplingParams(max_tokens=1, temperature=0)))
        while True:
            self._step()
            for message in self.engine.take_messages():
                for output in message.outputs if isinstance(message, Outputs) else ():
                    assert not output.error, output.error
                    assert output.cached is not None
                    took = self.clock() - began
                    self.settle()
                    return took, output.cached

    def forget(self) -> None:
        """All but what the store has."""
        self.settle()
        for tier in Tier:
            self.manager.flush(tier)

    def settle(self) -> None:
        while not self.manager.idle:
            self._step()

    def _learn(self, pages: int) -> None:
        """The rates, as an engine that has run for a while knows them."""
        costs = self.manager.costs
        costs.force(Way.FETCH)
        for number in range(3):
            prompt = numbers(pages, 100 + number)
            self.first_token_s(prompt)
            self.forget()
            self.first_token_s(prompt)
            self.forget()

    def _step(self) -> None:
        if not self.engine.step():
            left_s = self.model.workers.next_s()
            self.clock.advance(_TICK_S if left_s is None else max(left_s, _TICK_S))


def numbers(pages: int, seed: int) -> list[int]:
    """A prompt of so many pages, and a token that is always computed."""
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, pages * PAGE + 1)
    return [int(token) for token in drawn]
