"""Pieces of text → one JSON answer, or a stream of server-sent events.

    answer = ChoicesAnswer.to(body, form, info)
    whole = answer.whole(running)            told = answer.streamed(running)
    whole.add(piece), for each               told.tell(piece), for each: events
    whole.encoded()                          told.end(): the last ones

Here for chats and completions, whose choices a Format writes. Knows nothing of the engine, and
waits for nothing.

A stream's status is sent with its first event, so what fails before the first token is an ordinary
error answer; what fails later is an event {"error": …}, after which the stream ends without [DONE].

The usage object:

    cached_tokens                all that were not computed: the sum of the others
    cached_tokens_by_tier        found by this server: in its tiers, or at a peer
    cached_tokens_at_prefill     found by the prefill server, in its tiers, and handed over
    store_hit_tokens             what this server's store had, beyond device and host, used or not
    accepted_prediction_tokens   of the answer: proposed ahead, and what the model would have said
    rejected_prediction_tokens   proposed ahead, and thrown away: not part of the answer
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from quire.engine.messages import CachedTokens, EngineInfo
from quire.server.formats import Echo, Format, prompt_logprobs
from quire.server.generation import Running
from quire.server.requests import GenerationRequest
from quire.text.scribe import Piece, Said, Scored
from quire.text.tools import Text

DONE = b"data: [DONE]\n\n"


class Whole(Protocol):
    """An answer in one piece."""

    def add(self, piece: Piece) -> None: ...

    def encoded(self) -> bytes: ...


class Streamed(Protocol):
    """An answer as server-sent events."""

    def tell(self, piece: Piece) -> Iterator[bytes]: ...

    def end(self) -> Iterator[bytes]:
        """Once all has been told."""


class Answering(Protocol):
    """How a request is answered, whole or as a stream."""

    def whole(self, running: Running) -> Whole: ...

    def streamed(self, running: Running) -> Streamed: ...


@dataclass(frozen=True, slots=True)
class ChoicesAnswer(Answering):
    """In which format, and what is told beside the text."""

    form: Format
    model: str
    fingerprint: str
    wants_logprobs: bool
    include_usage: bool
    wants_ids: bool = False
    wants_answer_ids: bool = False
    """Without those of the prompt."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def to(cls, body: GenerationRequest, form: Format, info: EngineInfo) -> ChoicesAnswer:
        return cls(
            form,
            model=body.model,
            fingerprint=info.fingerprint,
            wants_logprobs=body.num_logprobs is not None,
            include_usage=body.include_usage,
            wants_ids=bool(body.return_token_ids),
            wants_answer_ids=bool(body.return_answer_ids),
        )

    def whole(self, running: Running) -> WholeAnswer:
        return WholeAnswer(self, running)

    def streamed(self, running: Running) -> StreamedAnswer:
        return StreamedAnswer(self, running)

    def heading(self, kind: str) -> dict[str, Any]:
        """What every object of it begins with."""
        return {
            "id": f"{self.form.id_prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
        }

    def scored(self, scored: list[Scored]) -> list[Scored] | None:
        return scored if self.wants_logprobs else None

    def tokens(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self.wants_ids or self.wants_answer_ids else {}


@dataclass(slots=True)
class _Grown:
    """A choice as it grows."""

    said: list[Said] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None


class WholeAnswer(Whole):
    """The JSON of all choices."""

    def __init__(self, answer: ChoicesAnswer, running: Running) -> None:
        self._answer = answer
        self._running = running
        self._usage = Usage.of(running)
        self._choices = [_Grown() for _ in running.work.choices]

    def add(self, piece: Piece) -> None:
        self._usage.count(piece, self._running)
        choice = self._choices[piece.index]
        choice.said += piece.said
        choice.tokens += piece.tokens
        choice.scored += piece.scored
        choice.finish = piece.finish

    def encoded(self) -> bytes:
        answer, running = self._answer, self._running
        form = answer.form
        of_prompts = _OfPrompts(answer, running)
        choices = [
            {"index": i}
            | form.whole(choice.said, answer.scored(choice.scored), _echo(running, i))
            | {"finish_reason": choice.finish}
            | of_prompts.of_choice(i)
            | answer.tokens(choice.tokens)
            for i, choice in enumerate(self._choices)
        ]
        told = {"choices": choices, "usage": self._usage.to_dict()}
        return msgspec.json.encode(
            answer.heading(form.whole_object) | told | of_prompts.of_answer()
        )


class StreamedAnswer(Streamed):
    """Chunks of choices."""

    def __init__(self, answer: ChoicesAnswer, running: Running) -> None:
        self._answer = answer
        self._running = running
        self._usage = Usage.of(running)
        self._of_prompts = _OfPrompts(answer, running)
        self._opened: set[int] = set()
        self._base = answer.heading(answer.form.chunk_object)
        if answer.include_usage:
            self._base["usage"] = None

    def tell(self, piece: Piece) -> Iterator[bytes]:
        self._usage.count(piece, self._running)
        if piece.index not in self._opened:
            self._opened.add(piece.index)
            yield from self._open(piece.index)
        for content in self._chunks(piece):
            yield _event(self._base, piece.index, content, None)
        if piece.finish is not None:
            yield _event(self._base, piece.index, self._answer.form.chunk(None, None), piece.finish)

    def end(self) -> Iterator[bytes]:
        if self._answer.include_usage:
            yield _data(self._base | {"choices": [], "usage": self._usage.to_dict()})
        yield DONE

    def _open(self, index: int) -> Iterator[bytes]:
        form, of_prompts = self._answer.form, self._of_prompts
        opening = form.opening(_echo(self._running, index))
        if opening is None and self._answer.wants_ids:
            opening = form.chunk(None, None)
        if opening is not None:
            first = self._base | of_prompts.of_answer()
            yield _event(first, index, opening | of_prompts.of_choice(index), None)

    def _chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """One for each thing said; the tokens and their probabilities come with the first."""
        scored = self._answer.scored(piece.scored)
        tokens = self._answer.tokens(piece.tokens)
        said: Sequence[Said] = piece.said
        if not said and (scored or (tokens and piece.tokens)):
            said = [Text("")]
        none: list[Scored] | None = None if scored is None else []
        for i, each in enumerate(said):
            is_first = i == 0
            chunk = self._answer.form.chunk(each, scored if is_first else none)
            yield chunk | (tokens if is_first else {})


class _OfPrompts:
    """What is told of the prompts, if it is wanted: token ids and log probabilities, where vLLM has
    them too."""

    def __init__(self, answer: ChoicesAnswer, running: Running) -> None:
        self._answer = answer
        self._running = running
        self._is_shared = answer.form.shares_prompt

    def of_answer(self) -> dict[str, Any]:
        return self._told(0) if self._is_shared else {}

    def of_choice(self, index: int) -> dict[str, Any]:
        return {} if self._is_shared else self._told(self._running.work.prompt_of(index))

    def _told(self, number: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._answer.wants_ids:
            told["prompt_token_ids"] = self._running.work.prompts[number].ids
        if self._running.scores:
            scored = self._running.scores[number]
            told["prompt_logprobs"] = prompt_logprobs(scored, self._answer.form.vocabulary)
        return told


def _echo(running: Running, index: int) -> Echo | None:
    return running.echoes[index] if running.echoes else None


def _event(base: dict[str, Any], index: int, content: dict[str, Any], finish: str | None) -> bytes:
    return _data(base | {"choices": [{"index": index} | content | {"finish_reason": finish}]})


def _data(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Counts as an answer grows. A prompt is counted once, however many choices it has."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    cached: list[CachedTokens] = field(default_factory=list)
    """Of the first choice of each prompt: the others share its pages."""

    @classmethod
    def of(cls, running: Running) -> Usage:
        return cls(sum(prompt.num_tokens for prompt in running.work.prompts))

    def count(self, piece: Piece, running: Running) -> None:
        self.num_completion_tokens += piece.num_tokens
        self.num_accepted_tokens += piece.num_accepted
        self.num_rejected_tokens += piece.num_rejected
        if piece.cached is not None and running.work.is_first(piece.index):
            self.cached.append(piece.cached)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_rejected_tokens,
            },
            "prompt_tokens_details": cached_to_dict(self.cached)
            | {
                "cached_tokens_at_prefill": {
                    "device": sum(each.prefill_device for each in self.cached),
                    "host": sum(each.prefill_host for each in self.cached),
                    "store": sum(each.prefill_store for each in self.cached),
                }
            },
        }


def cached_to_dict(cached: list[CachedTokens]) -> dict[str, Any]:
    return {
        "cached_tokens": sum(each.total for each in cached),
        "cached_tokens_by_tier": {
            "device": sum(each.device for each in cached),
            "host": sum(each.host for each in cached),
            "store": sum(each.store for each in cached),
            "peer": sum(each.peer for each in cached),
        },
        "store_hit_tokens": sum(each.store + each.store_left for each in cached),
    }
