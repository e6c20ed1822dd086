"""Driver: an engine in this process, asked one thing at a time, as its own loop would run it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quire.bench.gpu.driving import Drive, Heard, Tokens
from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, SamplingParams
from quire.errors import EngineError
from quire.types import Tier

__all__ = ["Answer", "Driver", "Tokens"]


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
        self._drive = Drive(engine)
        self._heard: Heard | None = None
        """Of the request that was begun last."""

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
        self._heard = self._drive.begin(
            prompt, SamplingParams(max_tokens=num_tokens, temperature=0)
        )

    @property
    def has_begun(self) -> bool:
        """Something was answered."""
        return self._heard is not None and bool(self._heard.tokens)

    @property
    def is_done(self) -> bool:
        return self._heard is not None and self._heard.is_over

    def result(self) -> tuple[list[int], CachedTokens]:
        """Raises EngineError if there is none."""
        if self._heard is None or self._heard.cached is None:
            raise EngineError("a request went wrong: it had no tokens")
        return self._heard.tokens, self._heard.cached

    def step(self) -> None:
        """Raises EngineError if the request went wrong."""
        self._drive.step()

    def settle(self) -> None:
        """Wait until copies and writes have ended. Raises EngineError."""
        self._drive.settle()

    def flush(self, *tiers: Tier) -> None:
        """When it has settled."""
        self._drive.forget(*tiers)
