"""One streamed request to an OpenAI-compatible server, timed, and its answer checked in form.

Nothing that the server does raises: every request ends as an Answer, good, failed (the server or
the network said no) or malformed (it said something that the protocol does not allow).
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import msgspec

from quire.bench import Json
from quire.decoders import json_decoder

TIERS = ("device", "host", "store", "peer")
ANYWHERE = "cached"
"""The tier of a server that says how much was cached, but not where."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
"""And nothing else: an event's text may hold what Python would take for the end of a line."""
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r){2}")
"""An empty line; `?>`, as the halves of one \\r\\n are not two ends."""


class Verdict(enum.Enum):
    GOOD = "good"
    FAILED = "failed"
    MALFORMED = "malformed"


@dataclass(slots=True)
class ChatAnswer:
    """Times are from the moment the request was sent."""

    verdict: Verdict
    problem: str = ""
    """What is wrong, when something is."""
    ttft_s: float | None = None
    total_s: float = 0.0
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    """None: the server did not say. So for the next two."""
    output_tokens: int | None = None
    cached: Mapping[str, int] | None = None
    """Prompt tokens that were not computed, by tier."""
    prompt_ids: list[int] = field(default_factory=list)
    """If asked for, and the server says; so for the next."""
    output_ids: list[int] = field(default_factory=list)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first."""
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)


_Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    """Of a chat chunk, with a delta, or of a completion chunk, with text."""

    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None
    cached_tokens_by_tier: dict[str, _Tokens | None] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None


class Chunk(msgspec.Struct):
    """One event of a stream, as far as it is looked at."""

    choices: Annotated[list[_Choice], msgspec.Meta(max_length=1)] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


class _FailedError(Exception):
    pass


class _MalformedError(Exception):
    pass


async def stream(
    client: httpx.AsyncClient, path: str, body: Json, *, timeout_s: float = 600.0
) -> ChatAnswer:
    """POST `body` with streaming and usage switched on, read the answer to its end."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer, began_s = ChatAnswer(Verdict.GOOD), time.perf_counter()
    try:
        async with client.stream("POST", path, json=request, timeout=timeout_s) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _FailedError(_refusal(response))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise _MalformedError(f"the answer is {kind or 'of no type'}, not an event stream")
            usage = await _read(response, answer, began_s)
        _count_up(answer, usage, body.get("max_tokens"))
        return answer
    except (_MalformedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        verdict, problem = Verdict.MALFORMED, str(error)
    except _FailedError as error:
        verdict, problem = Verdict.FAILED, str(error)
    except httpx.TimeoutException:
        verdict, problem = Verdict.FAILED, f"no answer within {timeout_s:g} s"
    except httpx.HTTPError as error:
        verdict, problem = Verdict.FAILED, f"{type(error).__name__}: {error}".rstrip(": ")
    total_s = time.perf_counter() - began_s
    return ChatAnswer(verdict, problem, answer.ttft_s, total_s, answer.text)


class EventParser:
    """Server-sent events: give it what arrives; it yields the data of each that is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[str]:
        *events, self._rest = _EVENT_END.split(self._rest + piece)
        for event in events:
            # Comments (":..."), ids and event names say nothing that a client here needs.
            fields = (line.partition(b":") for line in _LINE_END.split(event))
            data = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
            if data:
                yield b"\n".join(data).decode()

    @property
    def is_between_events(self) -> bool:
        """Nothing has been received of an event that did not end."""
        return not self._rest.strip()


async def _read(response: httpx.Response, answer: ChatAnswer, began_s: float) -> _Usage:
    """What the chunks add up to, in `answer`; the usage."""
    parser, is_done = EventParser(), False
    usage, decoder = _Usage(), json_decoder(Chunk)
    async for piece in response.aiter_raw():
        passed_s = time.perf_counter() - began_s
        for event in parser.feed(piece):
            if is_done:
                raise _MalformedError("something follows [DONE]")
            is_done = event == "[DONE]"
            if not is_done:
                chunk = decoder.decode(event)
                usage = chunk.usage or usage
                _take(chunk, answer, passed_s)
    if not is_done:
        raise _MalformedError("the stream ended without [DONE]")
    if not parser.is_between_events:
        raise _MalformedError("the stream ended in the middle of an event")
    return usage


def _take(chunk: Chunk, answer: ChatAnswer, passed_s: float) -> None:
    if chunk.error is not None:
        raise _FailedError(_error_text(chunk.error))
    if chunk.choices is None:
        raise _MalformedError("a chunk has no choices")
    answer.prompt_ids = answer.prompt_ids or chunk.prompt_token_ids or []
    for choice in chunk.choices:
        if answer.finish_reason:
            raise _MalformedError("a choice follows the one with finish_reason")
        if choice.text is None and choice.delta is None:
            raise _MalformedError("a choice has neither delta nor text")
        delta = choice.delta or _Delta()
        text = choice.text or delta.content or ""
        # Reasoning and calls are generated too, and are not part of the text.
        if text or delta.reasoning_content or delta.tool_calls or choice.finish_reason:
            answer.ttft_s = answer.ttft_s or passed_s
            answer.total_s = passed_s
        answer.text += text
        answer.output_ids += choice.token_ids or []
        answer.finish_reason = choice.finish_reason or ""


def _count_up(answer: ChatAnswer, usage: _Usage, max_tokens: int | None) -> None:
    if not answer.finish_reason:
        raise _MalformedError("the stream ended without finish_reason")
    prompt_tokens, output_tokens = usage.prompt_tokens, usage.completion_tokens
    cached = _cached(usage.prompt_tokens_details or _Details())
    if max_tokens is not None and (output_tokens or 0) > max_tokens:
        raise _MalformedError(f"{output_tokens} tokens came, {max_tokens} were asked for")
    if cached is not None and prompt_tokens is not None and sum(cached.values()) > prompt_tokens:
        raise _MalformedError("more tokens are said to be cached than the prompt has")
    answer.prompt_tokens, answer.output_tokens = prompt_tokens, output_tokens
    answer.cached = cached


def _cached(details: _Details) -> dict[str, int] | None:
    if details.cached_tokens_by_tier is not None:
        by_tier = details.cached_tokens_by_tier
        return {tier: by_tier[tier] or 0 for tier in TIERS if tier in by_tier}
    return None if details.cached_tokens is None else {ANYWHERE: details.cached_tokens}


def _refusal(response: httpx.Response) -> str:
    try:
        text = _error_text(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = response.text[:200].strip()
    return f"{response.status_code} {text}".strip()


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300]
