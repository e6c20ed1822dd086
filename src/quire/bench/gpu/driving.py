"""Drive: an engine in this process, with many requests at once; tokens by the time they came."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.bench import TokenArray
from quire.engine.engine import Engine
from quire.engine.messages import CachedTokens, Generate, Outputs, SamplingParams
from quire.errors import EngineError
from quire.types import RequestId, Tier

_SETTLE_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.001
"""When there is nothing to compute: nobody wakes us, as a server's loop is woken."""
_WARM_TOKENS = 8
"""Of each request, before anything is measured."""
_COPY_TOKENS = 64
"""For so many more, at most, the copies of the prompts are waited for."""


@dataclass(slots=True)
class Heard:
    """Of one request."""

    id: RequestId
    asked_s: float
    asked_cpu_s: float
    """Processor time of this process, as of then."""
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each of its tokens came."""
    first_token_cpu_s: float = 0.0
    cached: CachedTokens | None = None
    is_over: bool = False

    @property
    def reused(self) -> CachedTokens:
        """Of its prompt."""
        assert self.cached is not None, "a token, and nothing said of the cache"
        return self.cached

    @property
    def total_s(self) -> float:
        """From asking until the last token."""
        return self.times_s[-1] - self.asked_s

    @property
    def first_token_s(self) -> float:
        """From asking until it came."""
        return self.times_s[0] - self.asked_s


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0)


class Drive:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_asked = 0
        self._heard: dict[str, Heard] = {}

    def decode_ms(
        self, prompts: Sequence[TokenArray], params: SamplingParams, num_tokens: int
    ) -> float:
        """Between two tokens of one request, while all of them decode; the median. Raises
        EngineError if one ends before that."""
        with self.decoding(prompts, params) as decoding:
            return decoding.gap_ms(num_tokens)

    @contextlib.contextmanager
    def decoding(self, prompts: Sequence[TokenArray], params: SamplingParams) -> Iterator[Decoding]:
        """All of them decode, and go on doing so."""
        heard = [self.begin(prompt, params) for prompt in prompts]
        while any(len(one.times_s) < _WARM_TOKENS for one in heard):
            self.step()
        first = heard[0]
        quiet = len(first.times_s) + _COPY_TOKENS  # those that decode fill pages all the time
        while not self.engine.manager.idle and len(first.times_s) < quiet:
            self.step()
        yield Decoding(self, heard)
        for one in heard:
            self.engine.scheduler.abort(one.id)
        self.settle()

    def first_token_s(self, prompt: TokenArray) -> tuple[float, CachedTokens]:
        """From asking until it came, and what of the prompt was reused."""
        heard = self.ask(prompt, 1)
        self.settle()
        return heard.first_token_s, heard.reused

    def ask(self, prompt: TokenArray, num_tokens: int) -> Heard:
        """Greedy, to its end."""
        (heard,) = self.answer_all([prompt], greedy(num_tokens))
        return heard

    def answer_all(
        self, prompts: Sequence[TokenArray], params: SamplingParams, at_once: int | None = None
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

    def begin(self, prompt: TokenArray, params: SamplingParams) -> Heard:
        """Hand over a request; `step` until it is over."""
        self._num_asked += 1
        name = RequestId(f"bench-{self._num_asked}")
        heard = Heard(name, time.perf_counter(), time.process_time())
        self._heard[heard.id] = heard
        self.engine.handle(Generate(heard.id, prompt.astype("<i4").tobytes(), params))
        return heard

    def step(self) -> None:
        """Raises EngineError if a request went wrong."""
        if not self.engine.step():
            time.sleep(min(self.engine.patience_s(), _LOOK_EVERY_S))
        now = time.perf_counter()
        for message in self.engine.take_messages():
            for output in message.outputs if isinstance(message, Outputs) else []:
                if output.error:
                    raise EngineError(f"a request went wrong: {output.error}")
                heard = self._heard[output.id]
                if output.tokens and not heard.tokens:
                    heard.first_token_cpu_s = time.process_time() - heard.asked_cpu_s
                heard.tokens += output.tokens
                heard.times_s += [now] * len(output.tokens)
                heard.cached = heard.cached or output.cached
                heard.is_over = output.finish is not None


class Decoding:
    """Requests that decode together, measured at one of them."""

    def __init__(self, drive: Drive, heard: Sequence[Heard]) -> None:
        self._drive = drive
        self._heard = heard

    def gap_ms(self, num_tokens: int) -> float:
        """Between two tokens; the median of so many. Raises EngineError if one ends before."""
        times_s = self._heard[0].times_s
        start = len(times_s)
        while len(times_s) < start + num_tokens + 1:
            self._step()
        return statistics.median(_gaps_ms(times_s[start:]))

    def gaps_beside(self, prompt: TokenArray) -> list[float]:
        """Milliseconds between two tokens, from the last before another's prompt is asked until
        that has its first token. Raises EngineError, as `gap_ms`."""
        times_s = self._heard[0].times_s
        start = len(times_s) - 1
        other = self._drive.begin(prompt, greedy(1))
        while not other.times_s or times_s[-1] < other.times_s[0]:
            self._step()
        while not other.is_over:
            self._step()
        until = other.times_s[0]
        end = next(i for i, at in enumerate(times_s) if at >= until)
        return _gaps_ms(times_s[start : end + 1])

    def _step(self) -> None:
        if any(one.is_over for one in self._heard):
            raise EngineError("a request ended before all were measured: give it more tokens")
        self._drive.step()


def _gaps_ms(times_s: Sequence[float]) -> list[float]:
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times_s)]
