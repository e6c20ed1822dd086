"""Driver: an engine in this process, asked one thing at a time, as its own loop would run it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, Generate, Output, Outputs, SamplingParams
from quire.errors import EngineError
from quire.types import RequestId, Tier

Tokens = npt.NDArray[np.int32]

_SETTLE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    cached: CachedTokens
    ttft_s: float
    ttft_cpu_s: float
    """Processor time of this process up to the first token."""
    total_s: float


class Driver:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_asked = 0
        self._outputs: list[Output] = []

    def ask(self, prompt: Tokens, num_tokens: int) -> Answer:
        """Greedy, and of full length. Raises EngineError unless it ends well."""
        began, cpu_began = time.perf_counter(), time.process_time()
        first: tuple[float, float] | None = None
        self.begin(prompt, num_tokens)
        while not self.is_done:
            self.step()
            if first is None and self.has_begun:
                first = (time.perf_counter() - began, time.process_time() - cpu_began)
        total_s = time.perf_counter() - began
        tokens, cached = self.result()
        assert first is not None, "tokens, but no first one"
        return Answer(tokens, cached, *first, total_s)

    def begin(self, prompt: Tokens, num_tokens: int) -> None:
        """Hand over a request; `step` until `is_done`, then take its `result`."""
        self._num_asked += 1
        self._outputs = []
        params = SamplingParams(max_tokens=num_tokens, temperature=0)
        tokens = prompt.astype("<i4").tobytes()
        self._engine.handle(Generate(RequestId(f"bench-{self._num_asked}"), tokens, params))

    @property
    def has_begun(self) -> bool:
        """Something was answered."""
        return bool(self._outputs)

    @property
    def is_done(self) -> bool:
        return bool(self._outputs) and self._outputs[-1].finish is not None

    def result(self) -> tuple[list[int], CachedTokens]:
        """Raises EngineError unless the request ended well."""
        error, cached = self._outputs[-1].error, self._outputs[0].cached
        if error or cached is None:
            raise EngineError(f"a request went wrong: {error or 'it had no tokens'}")
        return [token for output in self._outputs for token in output.tokens], cached

    def step(self) -> None:
        if not self._engine.step() and not self._engine.manager.idle:
            time.sleep(self._engine.patience_s())
        for message in self._engine.take_messages():
            if isinstance(message, Outputs):
                self._outputs += message.outputs

    def settle(self) -> None:
        """Wait until copies and writes have ended. Raises EngineError."""
        began = time.perf_counter()
        while not self._engine.manager.idle:
            self.step()
            if time.perf_counter() - began > _SETTLE_TIMEOUT_S:
                raise EngineError(f"the engine still moves pages after {_SETTLE_TIMEOUT_S:.0f} s")

    def flush(self, *tiers: Tier) -> None:
        """When it has settled."""
        for tier in tiers:
            self._engine.manager.flush(tier)
