"""Pieces of text → one JSON answer, or a stream of server-sent events. For both endpoints.

What differs between chat and completions is behind `Format`. Knows nothing of the engine.

A stream's status is sent with its first event, so what fails before the first token is an ordinary
error answer; what fails later is an event {"error": …}, after which the stream ends without [DONE].
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.server.generation import Piece, Scored, Work
from quire.server.usage import Usage

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """How one endpoint writes a choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        """A whole choice, less index and finish_reason."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before a choice's first token."""

    def chunk(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        """A piece of a choice."""


class Running(NamedTuple):
    """A request under way."""

    work: Work
    format: Format
    pieces: AsyncIterator[Piece]


Start = Callable[[], AbstractAsyncContextManager[Running]]
"""Admits, tokenises and starts a request. Raises ApiError."""


@dataclass(slots=True)
class _Whole:
    """A choice as it grows."""

    texts: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer begins with."""

    model: str
    fingerprint: str
    wants_logprobs: bool
    include_usage: bool
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
    async with start() as (work, form, pieces):
        usage = _usage(work)
        choices = [_Whole() for _ in work.choices]
        async for piece in pieces:
            _count(usage, piece, work)
            choice = choices[piece.index]
            choice.texts.append(piece.text)
            choice.scored += piece.scored
            choice.finish = piece.finish
    return msgspec.json.encode(
        heading.of(form.id_prefix, form.whole_object)
        | {
            "choices": [
                {"index": i}
                | form.whole(i, "".join(choice.texts), heading.wanted(choice.scored))
                | {"finish_reason": choice.finish}
                for i, choice in enumerate(choices)
            ],
            "usage": usage.to_dict(),
        }
    )


async def events(start: Start, heading: Heading) -> AsyncGenerator[bytes, None]:
    """Server-sent events. Raises ApiError."""
    async with start() as (work, form, pieces):
        usage = _usage(work)
        base = heading.of(form.id_prefix, form.chunk_object)
        if heading.include_usage:
            base["usage"] = None
        opened: set[int] = set()
        async for piece in pieces:
            _count(usage, piece, work)
            if piece.index not in opened:
                opened.add(piece.index)
                opening = form.opening(piece.index)
                if opening is not None:
                    yield _event(base, piece.index, opening, None)
            scored = heading.wanted(piece.scored)
            if piece.text or scored:
                yield _event(base, piece.index, form.chunk(piece.text, scored), None)
            if piece.finish is not None:
                yield _event(base, piece.index, form.chunk("", None), piece.finish)
        if heading.include_usage:
            yield _data(base | {"choices": [], "usage": usage.to_dict()})
        yield DONE


def _event(base: dict[str, Any], index: int, content: dict[str, Any], finish: str | None) -> bytes:
    return _data(base | {"choices": [{"index": index} | content | {"finish_reason": finish}]})


def _data(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _usage(work: Work) -> Usage:
    return Usage(num_prompt_tokens=sum(prompt.num_tokens for prompt in work.prompts))


def _count(usage: Usage, piece: Piece, work: Work) -> None:
    usage.num_completion_tokens += piece.num_tokens
    usage.num_accepted_tokens += piece.num_accepted
    usage.num_rejected_tokens += piece.num_rejected
    if piece.cached is not None and work.is_first(piece.index):
        usage.cached.append(piece.cached)
