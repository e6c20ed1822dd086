"""Pieces of text → one JSON answer, or a stream of server-sent events. For both endpoints.

What differs between chat and completions is behind `Format`. Knows nothing of the engine.

A stream's status is sent with its first event, so what fails before the first token is an ordinary
error answer; what fails later is an event {"error": …}, after which the stream ends without [DONE].
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.server.generation import Work
from quire.server.usage import Usage
from quire.text.scribe import Piece, Said, Scored
from quire.text.tools import Text

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one endpoint writes a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    shares_prompt: bool
    """All choices have one prompt, whose token ids stand beside them and not in each."""

    def whole(self, index: int, said: list[Said], scored: list[Scored] | None) -> dict[str, Any]:
        """A whole choice, less index and finish_reason."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before a choice's first token."""

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        """A piece of a choice; None: nothing that is certain yet."""


class Running(NamedTuple):
    """A request under way."""

    work: Work
    format: Format
    pieces: AsyncIterator[Piece]
    scores: Sequence[Sequence[Any]] = ()
    """`prompt_logprobs` of every prompt, if they are wanted."""


Start = Callable[[], AbstractAsyncContextManager[Running]]
"""Admits, tokenises and starts a request. Raises ApiError."""


@dataclass(slots=True)
class _Whole:
    """A choice as it grows."""

    said: list[Said] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer begins with."""

    model: str
    fingerprint: str
    wants_logprobs: bool
    include_usage: bool
    wants_ids: bool = False
    wants_answer_ids: bool = False
    """Without those of the prompt."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def wanted(self, scored: list[Scored]) -> list[Scored] | None:
        return scored if self.wants_logprobs else None

    def of(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
        }


async def whole(start: Start, heading: Heading) -> bytes:
    """The JSON of a whole answer. Raises ApiError."""
    async with start() as (work, form, pieces, scores):
        usage = usage_of(work)
        choices = [_Whole() for _ in work.choices]
        async for piece in pieces:
            count(usage, piece, work)
            choice = choices[piece.index]
            choice.said += piece.said
            choice.tokens += piece.tokens
            choice.scored += piece.scored
            choice.finish = piece.finish
    ids = _OfPrompts(work, form, heading, scores)
    wants_ids = heading.wants_ids or heading.wants_answer_ids
    return msgspec.json.encode(
        heading.of(form.id_prefix, form.whole_object)
        | {
            "choices": [
                {"index": i}
                | form.whole(i, choice.said, heading.wanted(choice.scored))
                | {"finish_reason": choice.finish}
                | ids.of_choice(i)
                | ({"token_ids": choice.tokens} if wants_ids else {})
                for i, choice in enumerate(choices)
            ],
            "usage": usage.to_dict(),
        }
        | ids.of_answer()
    )


async def events(start: Start, heading: Heading) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises ApiError."""
    async with start() as (work, form, pieces, _):
        usage = usage_of(work)
        ids = _OfPrompts(work, form, heading)
        base = heading.of(form.id_prefix, form.chunk_object)
        if heading.include_usage:
            base["usage"] = None
        opened: set[int] = set()
        async for piece in pieces:
            count(usage, piece, work)
            if piece.index not in opened:
                opened.add(piece.index)
                opening = form.opening(piece.index)
                if opening is None and heading.wants_ids:
                    opening = form.chunk(None, None)
                if opening is not None:
                    first = base | ids.of_answer()
                    yield _event(first, piece.index, opening | ids.of_choice(piece.index), None)
            for content in _chunks(form, heading, piece):
                yield _event(base, piece.index, content, None)
            if piece.finish is not None:
                yield _event(base, piece.index, form.chunk(None, None), piece.finish)
        if heading.include_usage:
            yield _data(base | {"choices": [], "usage": usage.to_dict()})
        yield DONE


def _chunks(form: Format, heading: Heading, piece: Piece) -> Iterator[dict[str, Any]]:
    """One for each thing said; the tokens and their probabilities come with the first."""
    scored = heading.wanted(piece.scored)
    wants_ids = heading.wants_ids or heading.wants_answer_ids
    tokens = {"token_ids": piece.tokens} if wants_ids else {}
    said: Sequence[Said] = piece.said
    if not said and (scored or (tokens and piece.tokens)):
        said = [Text("")]
    for i, each in enumerate(said):
        none: list[Scored] | None = None if scored is None else []
        yield form.chunk(each, scored if i == 0 else none) | (tokens if i == 0 else {})


class _OfPrompts:
    """What is told of the prompts, if it is wanted: token ids and log probabilities, where vLLM has
    them too."""

    def __init__(
        self, work: Work, form: Format, heading: Heading, scores: Sequence[Sequence[Any]] = ()
    ) -> None:
        self._work = work
        self._wants_ids = heading.wants_ids
        self._is_shared = form.shares_prompt
        self._scores = scores

    def of_answer(self) -> dict[str, Any]:
        return self._told(0) if self._is_shared else {}

    def of_choice(self, index: int) -> dict[str, Any]:
        return {} if self._is_shared else self._told(self._work.prompt_of(index))

    def _told(self, number: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._wants_ids:
            told["prompt_token_ids"] = self._work.prompts[number].ids
        if self._scores:
            told["prompt_logprobs"] = self._scores[number]
        return told


def _event(base: dict[str, Any], index: int, content: dict[str, Any], finish: str | None) -> bytes:
    return _data(base | {"choices": [{"index": index} | content | {"finish_reason": finish}]})


def _data(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def usage_of(work: Work) -> Usage:
    return Usage(num_prompt_tokens=sum(prompt.num_tokens for prompt in work.prompts))


def count(usage: Usage, piece: Piece, work: Work) -> None:
    usage.num_completion_tokens += piece.num_tokens
    usage.num_accepted_tokens += piece.num_accepted
    usage.num_rejected_tokens += piece.num_rejected
    if piece.cached is not None and work.is_first(piece.index):
        usage.cached.append(piece.cached)
