"""An engine in this process, on the embedded model, driven step by step."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from quire.engine import executor
from quire.engine.build import build_engine
from quire.engine.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, Generate, Output, Outputs, SamplingParams
from quire.models import embedded_model, load_model
from quire.types import RequestId, Tier

PAGE_BYTES = 737_280
"""16 tokens of SmolLM2 in fp32."""
MAX_STEPS = 200_000


@functools.cache
def loaded(*args, **options):
    return load_model(*args, **options)


class EngineRig:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.manager = engine.manager
        self._number = 0
        self.cached: list[CachedTokens] = []
        """Of the last `answer`, per prompt."""

    def answer(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, salt: str = "", stagger: int = 0
    ) -> list[list[int]]:
        """Greedy answers, all at once; `stagger`: so many steps between arrivals."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0)
        ids = []
        outputs: list[Output] = []
        for prompt in prompts:
            self._number += 1
            ids.append(RequestId(f"r{self._number}"))
            tokens = np.array(prompt, dtype="<i4").tobytes()
            self.engine.handle(Generate(ids[-1], tokens, params, salt))
            outputs += self._steps(stagger)
        for _ in range(MAX_STEPS):
            if sum(output.finish is not None for output in outputs) == len(ids):
                break
            outputs += self._steps(1)
        else:
            raise AssertionError("requests did not finish")
        assert not [output for output in outputs if output.error]
        self.cached = [
            next(o.cached for o in outputs if o.id == i and o.cached is not None) for i in ids
        ]
        return [[t for o in outputs if o.id == i for t in o.tokens] for i in ids]

    def settle(self) -> None:
        """Until nothing is in flight."""
        for _ in range(MAX_STEPS):
            if self.manager.idle:
                self.manager.check_invariants()
                return
            self.engine.step()
        raise AssertionError("the cache did not come to rest")

    def flush(self, *tiers: Tier) -> None:
        self.settle()
        for tier in tiers:
            self.manager.flush(tier)

    def _steps(self, count: int) -> list[Output]:
        outputs = []
        for _ in range(count):
            self.engine.step()
            for message in self.engine.take_messages():
                if isinstance(message, Outputs):
                    outputs += message.outputs
        return outputs


@contextlib.contextmanager
def engine_rig(monkeypatch, *, device_pages: int = 256, host_pages: int = 512, **options):
    """The model is loaded once for all rigs of one rank: they run one after another."""
    monkeypatch.setattr(executor.rank, "load_model", loaded)
    config = EngineConfig(
        model=str(options.pop("model", embedded_model())),
        name="smollm2",
        device_bytes=device_pages * PAGE_BYTES,
        host_bytes=host_pages * PAGE_BYTES,
        debug=True,
        **options,
    )
    engine = build_engine(config)
    try:
        yield EngineRig(engine)
    finally:
        engine.close()


Rigs = Iterator[EngineRig]
