"""The longest step of a decode engine while its store stalls, beside the same without a stall.

A prefill and a decode engine in this process, stepped in turn; only the decode engine's steps are
timed. Some requests decode all the time, and others keep coming that look for their prefixes in
the store. In half of the windows every call of the store takes as long as the stall:

    plain     ▏step▏step▏step▏step▏ …      longest step a
    stalled   ▏step▏step▏step▏step▏ …      longest step b       ratio b / a, round by round

A step that waited for the store would last as long as the stall, and the ratio would show it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.stats import percentile
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig, Role
from quire.engine.engine import Engine
from quire.engine.messages import AbortRequest, Generate, Output, Outputs, SamplingParams
from quire.errors import EngineError
from quire.manager.operations import OperationKind
from quire.progress import Progress
from quire.types import RequestId

PLAIN, STALLED = "plain", "stalled"
SIDES = (PLAIN, STALLED)
TARGET = 2.0

_PATIENCE_S = 60.0
_STORE_KINDS = (OperationKind.PROBE, OperationKind.FETCH, OperationKind.WRITE)

Result = dict[str, Any]
Step = Callable[[Engine, str], bool]
"""One step of the decode engine on a side: replaced where the benchmark itself is tested."""


@dataclass(frozen=True, slots=True)
class Plan:
    stall_s: float = 5.0
    """How long every call of the stalled store takes."""
    rounds: int = 3
    decoding: int = 2
    """Requests that generate all the time."""
    looking: int = 6
    """Requests per window that look for a prefix."""
    pages: int = 4
    """Of their prompts; one more token is computed by the decode engine."""
    page_size: int = 16
    threads: int = 1
    memory_bytes: int = 128 << 20
    """Of each engine's pages, on the device and on the host."""
    seed: int = 0

    @property
    def window_s(self) -> float:
        """A stall, and the time in which those who waited for it go on."""
        return self.stall_s * 1.2


def run(
    model: Path,
    folder: Path,
    plan: Plan | None = None,
    progress: Progress = lambda *_: None,
    step: Step = lambda engine, _side: engine.step(),
) -> Result:
    """`folder`: for the store. Raises EngineError, ModelError, MemoryBudgetError."""
    plan = plan or Plan()
    total = 2 * plan.rounds
    windows: list[dict[str, Result]] = []
    with _engines(model, plan) as (prefill, decode):
        bench = _Bench(prefill, decode, folder, plan, step)
        bench.warm_up()
        for number in range(plan.rounds):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            window = {}
            for i, side in enumerate(order):
                progress("a store that stalls", 2 * number + i, total)
                window[side] = bench.window(side)
            windows.append(window)
        progress("a store that stalls", total, total)
    return _summed_up(plan, windows)


def _summed_up(plan: Plan, windows: list[dict[str, Result]]) -> Result:
    ratios = [one[STALLED]["longest_s"] / one[PLAIN]["longest_s"] for one in windows]
    ratio = statistics.median(ratios)
    sides = {}
    for side in SIDES:
        steps = [step for one in windows for step in one[side]["steps"]]
        sides[side] = {
            "steps": len(steps),
            "median_s": statistics.median(steps),
            "p99_s": percentile(steps, 0.99),
            "longest_s": statistics.median(one[side]["longest_s"] for one in windows),
            "longest_of_all_s": max(steps),
            "ttft_s": statistics.median(t for one in windows for t in one[side]["ttfts"]),
            "waited_s": min(one[side]["waited_s"] for one in windows),
        }
    return {
        "stall_s": plan.stall_s,
        "rounds": plan.rounds,
        "decoding": plan.decoding,
        "looking": plan.looking,
        "sides": sides,
        "ratios": ratios,
        "ratio": ratio,
        "target": TARGET,
        "ok": ratio < TARGET and sides[STALLED]["waited_s"] > plan.stall_s / 2,
    }


@contextlib.contextmanager
def _engines(model: Path, plan: Plan) -> Iterator[tuple[Engine, Engine]]:
    with contextlib.ExitStack() as stack:

        def start(role: Role, prefill: list[str]) -> Engine:
            engine = build_engine(
                EngineConfig(
                    model=str(model),
                    name="bench",
                    page_size=plan.page_size,
                    device_bytes=plan.memory_bytes,
                    host_bytes=plan.memory_bytes,
                    prefetch_threshold=plan.page_size,
                    threads=plan.threads,
                    # One that was looking at a time: those whom the stall held back together would
                    # else be computed together, in a step that is longer for a good reason.
                    max_running=plan.decoding + 1,
                    role=role,
                    peer_port=0,
                    peer_secret="only for a benchmark",
                    prefill=prefill,
                )
            )
            stack.callback(engine.close)
            return engine

        first = start(Role.PREFILL, [])
        yield first, start(Role.DECODE, [first.info.peer])


@dataclass(slots=True)
class _Asked:
    began_s: float
    ttft_s: float | None = None
    done: bool = False


@dataclass(slots=True)
class _Bench:
    prefill: Engine
    decode: Engine
    folder: Path
    plan: Plan
    step: Step
    asked: dict[RequestId, _Asked] = field(default_factory=dict)
    number: int = 0

    def url(self, side: str) -> str:
        path = (self.folder / "store").as_uri().removeprefix("file://")
        if side == PLAIN:
            return f"file://{path}?max=1GiB"
        return f"faulty+file://{path}?max=1GiB&delay=1&delay_s={self.plan.stall_s:g}"

    def warm_up(self) -> None:
        """The first requests of a process are slower."""
        self._attach(self.url(PLAIN))
        first = [self._ask(4) for _ in range(self.plan.decoding)]
        self._until(lambda: all(self.asked[one].done for one in first))

    def window(self, side: str) -> Result:
        """Steps while the store is as the side says. Everybody has gone when it returns."""
        self._attach(self.url(PLAIN))
        decoding = [self._ask(1 << 10) for _ in range(self.plan.decoding)]
        self._until(lambda: all(self.asked[one].ttft_s for one in decoding))
        self._attach(self.url(side))
        steps, looking, waited_s = self._watch(side)
        self._until(lambda: all(self.asked[one].done for one in looking))
        for one in decoding:
            self.decode.handle(AbortRequest(one))
        ttfts = [self.asked[one].ttft_s for one in looking]
        return {
            "steps": steps,
            "longest_s": max(steps),
            "ttfts": [ttft for ttft in ttfts if ttft is not None],
            "waited_s": waited_s,
        }

    def _watch(self, side: str) -> tuple[list[float], list[RequestId], float]:
        """How long steps took, who looked, and how long something waited for the store."""
        steps: list[float] = []
        waited_s = 0.0
        looking: list[RequestId] = []
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < self.plan.window_s:
            # In the first half of the window, so that they wait while the store stalls.
            due = passed * 2 * self.plan.looking / self.plan.window_s
            if len(looking) < min(self.plan.looking, 1 + int(due)):
                looking.append(self._ask(2))
            before = time.perf_counter()
            self.step(self.decode, side)
            steps.append(time.perf_counter() - before)
            waited_s = max(waited_s, self._oldest_s())
            self._others()
        return steps, looking, waited_s

    def _oldest_s(self) -> float:
        """Age of the oldest thing that was asked of the store and not answered."""
        now = time.monotonic()
        running = self.decode.manager.operations.running.values()
        return max((now - op.started_s for op in running if op.kind in _STORE_KINDS), default=0.0)

    def _ask(self, num_tokens: int) -> RequestId:
        self.number += 1
        name = RequestId(f"stall-{self.number}")
        chance = np.random.default_rng((self.plan.seed, self.number))
        count = self.plan.pages * self.plan.page_size + 1
        words = chance.integers(3, self.decode.info.vocab_size, count).astype("<i4")
        self.asked[name] = _Asked(time.perf_counter())
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self.decode.handle(Generate(name, words.tobytes(), params))
        return name

    def _attach(self, url: str) -> None:
        change = self.decode.manager.store.attach(url)
        self._until(lambda: change.done)
        if change.error:
            raise EngineError(f"store: {change.error}")

    def _until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise EngineError(f"the engines are not done after {_PATIENCE_S:.0f} s")
            self.decode.step()
            self._others()

    def _others(self) -> None:
        """What happens beside the decode engine's step."""
        worked = self.prefill.step()
        self.prefill.take_messages()
        for message in self.decode.take_messages():
            if isinstance(message, Outputs):
                for output in message.outputs:
                    self._hear(output)
        if not worked:
            time.sleep(0.0005)

    def _hear(self, output: Output) -> None:
        if output.error:
            raise EngineError(f"a request went wrong: {output.error}")
        asked = self.asked[output.id]
        if asked.ttft_s is None and output.tokens:
            asked.ttft_s = time.perf_counter() - asked.began_s
        asked.done = output.finish is not None
