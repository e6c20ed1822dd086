"""Drive: an engine in this process, with many requests at once; tokens by the time they came."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, Generate, Outputs, SamplingParams
from quire.errors import EngineError
from quire.types import RequestId, Tier

Tokens = npt.NDArray[np.int32]
_SETTLE_TIMEOUT_S = 120.0
_WARM_TOKENS = 8
"""Of each request, before anything is measured."""
_COPY_TOKENS = 64
"""For so many more, at most, the copies of the prompts are waited for."""


@dataclass(slots=True)
class Heard:
    """Of one request."""

    id: RequestId
    asked_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each of its tokens came."""
    cached: CachedTokens | None = None
    is_over: bool = False

    @property
    def first_token_s(self) -> float:
        """From asking until it came."""
        return self.times_s[0] - self.asked_s


class Drive:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_asked = 0
        self._heard: dict[str, Heard] = {}

    def decode_ms(
        self, prompts: Sequence[Tokens], params: SamplingParams, num_tokens: int
    ) -> float:
        """Between two tokens of one request, while all of them decode; the median. Raises
        EngineError if one ends before that."""
        with self.decoding(prompts, params) as gap_ms:
            return gap_ms(num_tokens)

    @contextlib.contextmanager
    def decoding(
        self, prompts: Sequence[Tokens], params: SamplingParams
    ) -> Iterator[Callable[[int], float]]:
        """All of them decode; what comes measures as `decode_ms` does, as often as it is called."""
        heard = [self.begin(prompt, params) for prompt in prompts]
        while any(len(one.times_s) < _WARM_TOKENS for one in heard):
            self.step()
        first = heard[0]
        quiet = len(first.times_s) + _COPY_TOKENS  # those that decode fill pages all the time
        while not self.engine.manager.idle and len(first.times_s) < quiet:
            self.step()

        def gap_ms(num_tokens: int) -> float:
            start = len(first.times_s)
            while len(first.times_s) < start + num_tokens + 1:
                if any(one.is_over for one in heard):
                    raise EngineError(
                        "a request ended before all were measured: give it more tokens"
                    )
                self.step()
            gaps = [later - earlier for earlier, later in itertools.pairwise(first.times_s[start:])]
            return statistics.median(gaps) * 1e3

        yield gap_ms
        for one in heard:
            self.engine.scheduler.abort(one.id)
        self.settle()

    def first_token_s(self, prompt: Tokens) -> tuple[float, CachedTokens]:
        """From asking until it came, and what of the prompt was reused."""
        (heard,) = self.answer_all([prompt], SamplingParams(max_tokens=1, temperature=0))
        self.settle()
        assert heard.cached is not None, "a token, and nothing said of the cache"
        return heard.first_token_s, heard.cached

    def answer_all(
        self, prompts: Sequence[Tokens], params: SamplingParams, at_once: int | None = None
    ) -> list[Heard]:
        """To their ends, in this order, at most `at_once` of them under way."""
        waiting = list(reversed(prompts))
        heard: list[Heard] = []
        while waiting or any(not one.is_over for one in heard):
            running = sum(not one.is_over for one in heard)
            while waiting and (at_once is None or running < at_once):
                heard.append(self.begin(waiting.pop(), params))
                running += 1
            self.step()
        return heard

    def settle(self) -> None:
        """Until copies and writes have ended. Raises EngineError."""
        deadline = time.perf_counter() + _SETTLE_TIMEOUT_S
        while not self.engine.manager.idle or self.engine.manager.waiting_writes:
            self.step()
            if time.perf_counter() > deadline:
                raise EngineError(f"pages still move after {_SETTLE_TIMEOUT_S:.0f} s")

    def forget(self, *tiers: Tier) -> None:
        self.settle()
        for tier in tiers:
            self.engine.manager.flush(tier)

    def begin(self, prompt: Tokens, params: SamplingParams) -> Heard:
        """Hand over a request; `step` until it is over."""
        self._num_asked += 1
        heard = Heard(RequestId(f"bench-{self._num_asked}"), time.perf_counter())
        self._heard[heard.id] = heard
        self.engine.handle(Generate(heard.id, prompt.astype("<i4").tobytes(), params))
        return heard

    def step(self) -> None:
        """Raises EngineError if a request went wrong."""
        if not self.engine.step():
            time.sleep(self.engine.patience_s())
        now = time.perf_counter()
        for message in self.engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                if output.error:
                    raise EngineError(f"a request went wrong: {output.error}")
                heard = self._heard[output.id]
                heard.tokens += output.tokens
                heard.times_s += [now] * len(output.tokens)
                heard.cached = heard.cached or output.cached
                heard.is_over = output.finish is not None
