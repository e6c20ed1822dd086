"""Scribe: one choice's tokens → pieces of what it says.

    tokens ─▶ bytes ─▶ TextStream: text, stop strings ─▶ a parser of tools/: text, reasoning, calls

Knows nothing of the engine's queues, or of the JSON that pieces travel in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.messages import CachedTokens, Finish, Output
from quire.text.decoding import TextStream
from quire.text.prompting import Prompt, Prompting
from quire.text.reading import fed
from quire.text.tools import (
    Call,
    Malformed,
    Parser,
    Plain,
    Reason,
    Reasoning,
    Text,
    TextEvent,
    Tools,
)

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""


class Scored(NamedTuple):
    """A token with its probabilities."""

    token: int
    offset: int
    """Where its text begins, in characters from the beginning of the answer."""
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Called:
    """A call, as it is told to clients."""

    number: int
    """Among the calls of its choice."""
    id: str
    name: str
    arguments: str


Said = Text | Reasoning | Called


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one choice."""

    index: int
    said: list[Said]
    tokens: list[int]
    """Generated, whether or not their text is certain yet."""
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None
    """In OpenAI's words: "stop", "length" or "tool_calls"."""
    cached: CachedTokens | None = None
    num_accepted: int = 0
    """Of the tokens: proposed ahead."""
    num_rejected: int = 0
    """Proposed ahead, and not among them."""
    malformed: list[Reason] = field(default_factory=list)
    """Why what began like a call is none, for each that did."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Scribe:
    """Turns one choice's outputs into pieces."""

    def __init__(
        self,
        prompting: Prompting,
        index: int,
        prompt: Prompt,
        *,
        stops: Sequence[str],
        tools: Tools | None,
        is_one_call: bool,
    ) -> None:
        self._reading = prompting.reading
        self._vocabulary = prompting.vocabulary
        self._index = index
        self._text = TextStream(stops)
        self._is_one_call = is_one_call
        self._num_calls = 0
        self._parser: Parser = Plain()
        self._shown: frozenset[int] = frozenset()
        if tools is not None:
            self._shown = self._reading.shown(tools)
            parser = self._reading.parser(tools, is_thinking=prompt.is_thinking)
            self._parser = fed(parser, prompt.opening)

    def write(self, output: Output) -> Piece:
        said: list[Said] = []
        malformed: list[Reason] = []
        scored: list[Scored] = []
        tokens: list[int] = []
        last = len(output.tokens) - 1
        for i, token in enumerate(output.tokens):
            tokens.append(token)
            if output.finish is Finish.STOP and i == last:
                break  # the stop token is generated, but not part of the answer
            if output.logprobs:
                scored.append(self._score(token, output, i))
            self._say(self._parser.push(self._text.push(self._bytes(token))), said, malformed)
            if self._is_ended:
                break
        finish = _finish_reason(output, stopped=self._is_ended)
        if finish is not None:
            rest = self._text.finish()
            self._say(self._parser.push(rest) + self._parser.finish(), said, malformed)
            if self._is_ended:  # by what was held back until the end
                finish = "stop"
            if finish == "stop" and self._num_calls:
                finish = "tool_calls"
        accepted = min(output.accepted, len(tokens))
        rejected = output.rejected + output.accepted - accepted
        return Piece(
            self._index,
            said,
            tokens,
            scored,
            finish,
            output.cached,
            accepted,
            rejected,
            malformed,
        )

    @property
    def _is_ended(self) -> bool:
        return self._text.stopped or (self._is_one_call and self._num_calls > 0)

    def _bytes(self, token: int) -> bytes:
        """Special tokens are none, but for those that the parser wants to see."""
        is_shown = token in self._shown
        return self._vocabulary.name(token) if is_shown else self._vocabulary.text(token)

    def _say(self, events: list[TextEvent], said: list[Said], malformed: list[Reason]) -> None:
        for event in events:
            if self._is_one_call and self._num_calls:
                return  # one call, and nothing after it
            if isinstance(event, Malformed):
                malformed.append(event.reason)
            elif isinstance(event, Call):
                new_id = self._reading.new_id()
                said.append(Called(self._num_calls, new_id, event.name, event.arguments))
                self._num_calls += 1
            else:
                said.append(event)

    def _score(self, token: int, output: Output, i: int) -> Scored:
        found = output.logprobs[i]
        top = zip(found.top_ids, map(finite, found.top_logprobs), strict=True)
        return Scored(token, self._text.num_chars, finite(found.logprob), list(top))


def _finish_reason(output: Output, *, stopped: bool) -> str | None:
    if stopped or output.finish is Finish.STOP:
        return "stop"
    return None if output.finish is None else "length"


def finite(logprob: float) -> float:
    """As JSON can say it."""
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
