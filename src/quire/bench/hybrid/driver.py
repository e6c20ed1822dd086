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

    def ask(self, prompt: Tokens, num_tokens: int) -> Answer:
        """Greedy, and of full length. Raises EngineError unless it ends well."""
        self._num_asked += 1
        params = SamplingParams(max_tokens=num_tokens, temperature=0)
        message = Generate(
            RequestId(f"bench-{self._num_asked}"), prompt.astype("<i4").tobytes(), params
        )
        began, cpu_began = time.perf_counter(), time.process_time()
        first: tuple[float, float] | None = None
        outputs: list[Output] = []
        self._engine.handle(message)
        while not outputs or outputs[-1].finish is None:
            outputs += self._step()
            if outputs and first is None:
                first = (time.perf_counter() - began, time.process_time() - cpu_began)
        total_s = time.perf_counter() - began
        error, cached = outputs[-1].error, outputs[0].cached
        if error or cached is None or first is None:
            raise EngineError(f"a request went wrong: {error or 'it had no tokens'}")
        tokens = [token for output in outputs for token in output.tokens]
        return Answer(tokens, cached, *first, total_s)

    def settle(self) -> float:
        """Wait until copies and writes have ended; returns how long. Raises EngineError."""
        began = time.perf_counter()
        while not self._engine.manager.idle:
            self._step()
            if time.perf_counter() - began > _SETTLE_TIMEOUT_S:
                raise EngineError(f"the engine still moves pages after {_SETTLE_TIMEOUT_S:.0f} s")
        return time.perf_counter() - began

    def flush(self, *tiers: Tier) -> None:
        """When it has settled."""
        for tier in tiers:
            self._engine.manager.flush(tier)

    def close(self) -> None:
        self._engine.close()

    def _step(self) -> list[Output]:
        if not self._engine.step():
            time.sleep(self._engine.patience_s())
        messages = self._engine.take_messages()
        return [output for m in messages if isinstance(m, Outputs) for output in m.outputs]
