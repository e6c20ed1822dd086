"""An engine in this process, driven step by step."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from e2e.exactness.oracle import Answer
from e2e.exactness.subjects import PAGE, SMOLLM2, Subject
from quire.components import PoolSize
from quire.engine import build, executor
from quire.engine.batch import Batch, Segment
from quire.engine.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.forward.dense import load_dense
from quire.engine.messages import CachedTokens, Generate, Output, Outputs, SamplingParams
from quire.manager import Way
from quire.models import load_model
from quire.types import RequestId, Tier

PATIENCE_S = 300.0
"""Only how long a broken test takes to fail."""
PAUSE_S = 0.0005
"""After a step with nothing to compute: the cores are others' then."""
NUM_LOGPROBS = 5
WHOLE = 8192
"""Tokens in a step: more than any prompts together."""

Tamper = Callable[[list[Segment]], list[Segment] | None]
"""Other segments for a batch; None: it is not of the kind to change."""


@functools.cache
def loaded(*args: Any, **options: Any) -> Any:
    return load_model(*args, **options)


@functools.cache
def loaded_dense(*args: Any, **options: Any) -> Any:
    return load_dense(*args, **options)


class EngineRig:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.manager = engine.manager
        self._number = 0
        self.cached: list[CachedTokens] = []
        """Of the last `answer`, per prompt."""

    def begin(self, prompt: Sequence[int], num_tokens: int, salt: str = "") -> RequestId:
        """A greedy answer is asked for; `steps` bring it."""
        self._number += 1
        name = RequestId(f"r{self._number}")
        params = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=NUM_LOGPROBS)
        tokens = np.array(prompt, dtype="<i4").tobytes()
        self.engine.handle(Generate(name, tokens, params, salt))
        return name

    def answer(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, salt: str = "", stagger: int = 0
    ) -> list[Answer]:
        """Greedy answers, all at once; `stagger`: so many steps between arrivals."""
        ids = []
        outputs: list[Output] = []
        for prompt in prompts:
            ids.append(self.begin(prompt, num_tokens, salt))
            outputs += self.steps(stagger)
        deadline = time.monotonic() + PATIENCE_S
        while sum(output.finish is not None for output in outputs) < len(ids):
            assert time.monotonic() < deadline, "requests did not finish"
            outputs += self.steps(1)
        assert not [output for output in outputs if output.error]
        self.cached = [
            next(o.cached for o in outputs if o.id == i and o.cached is not None) for i in ids
        ]
        return [collect([output for output in outputs if output.id == i]) for i in ids]

    def reused(self, *tiers: str) -> int:
        """Tokens of the last prompts that came from these tiers; none named: from any."""
        names = tiers or ("device", "host", "store")
        return sum(getattr(cached, name) for cached in self.cached for name in names)

    def counter(self, name: str) -> int:
        return self.engine.status().counters.get(name, 0)

    def settle(self) -> None:
        """Until nothing is in flight, nor waits to be written again."""
        self.until(lambda: self.manager.idle and not self.manager.waiting_writes)
        self.manager.check_invariants()

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, "the cache did not come to rest"
            if not self.engine.step():
                time.sleep(PAUSE_S)

    def flush(self, *tiers: Tier) -> None:
        self.settle()
        for tier in tiers:
            self.manager.flush(tier)

    def evict(self, component: str, *tiers: Tier) -> int:
        """Pages of this component that are gone; everything else stays, as far as it can."""
        self.settle()
        gone = sum(self.manager.flush(tier, component) for tier in tiers)
        self.settle()
        return gone

    @contextlib.contextmanager
    def tampering(self, change: Tamper) -> Iterator[None]:
        """Once, the first batch for which `change` gives other segments is computed with those."""
        launch, done = self.engine._executor.launch, False

        def tampered(batch: Batch) -> None:
            nonlocal done
            changed = None if done else change(batch.segments)
            if changed is None:
                return launch(batch)
            done = True
            return launch(msgspec.structs.replace(batch, segments=changed))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine._executor, "launch", tampered)
            yield
        assert done, "there was nothing to tamper with"

    def steps(self, count: int) -> list[Output]:
        outputs = []
        for _ in range(count):
            worked = self.engine.step()
            for message in self.engine.take_messages():
                if isinstance(message, Outputs):
                    outputs += message.outputs
            if not worked:
                time.sleep(PAUSE_S)
        return outputs


def collect(outputs: list[Output]) -> Answer:
    return Answer(
        [token for output in outputs for token in output.tokens],
        [logprobs for output in outputs for logprobs in output.logprobs],
    )


@contextlib.contextmanager
def engine_rig(
    subject: Subject = SMOLLM2,
    *,
    device_pages: int = 256,
    host_pages: int = 512,
    snapshots: int = 64,
    way: Way = Way.FETCH,
    **options: Any,
) -> Iterator[EngineRig]:
    """The model is loaded once for all rigs of one rank: they run one after another. By `way`,
    always, they come by what the store has: a tiny model computes faster than any delivers.

    Pools are of exactly these sizes: the window's as many pages as those of full attention, and
    on each tier room for `snapshots`.
    """
    sizes = {
        "full": PoolSize(device_pages, host_pages),
        "window": PoolSize(device_pages, host_pages),
        "recurrent": PoolSize(snapshots, snapshots if host_pages else 0),
    }
    config = EngineConfig(
        model=str(subject.find()),
        name=subject.name,
        page_size=PAGE,
        device_bytes=1,
        host_bytes=min(1, host_pages),
        threads=subject.threads,
        debug=True,
        **dict(subject.options),
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build, "plan_pools", lambda *_: {name: sizes[name] for name in subject.components}
        )
        patch.setattr(executor.rank, "load_model", loaded)
        patch.setattr(executor.rank, "load_dense", loaded_dense)
        engine = build.build_engine(config)
        engine.manager.costs.force(way)
        try:
            yield EngineRig(engine)
        finally:
            engine.close()
