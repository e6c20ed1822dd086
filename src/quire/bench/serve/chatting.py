"""One streamed request to an OpenAI-compatible server, timed, and its answer checked in form.

Nothing that the server does raises: every request ends as an Answer, good, failed (the server or
the network said no) or malformed (it said something that the protocol does not allow).
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from quire.bench.sse import EventParser

TIERS = ("device", "host", "store", "peer")
ANYWHERE = "cached"
"""The tier of a server that says how much was cached, but not where."""

Json = dict[str, Any]


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
        _count_up(answer, usage, body)
        return answer
    except _MalformedError as error:
        verdict, problem = Verdict.MALFORMED, str(error)
    except _FailedError as error:
        verdict, problem = Verdict.FAILED, str(error)
    except httpx.TimeoutException:
        verdict, problem = Verdict.FAILED, f"no answer within {timeout_s:g} s"
    except httpx.HTTPError as error:
        verdict, problem = Verdict.FAILED, f"{type(error).__name__}: {error}".rstrip(": ")
    total_s = time.perf_counter() - began_s
    return ChatAnswer(verdict, problem, answer.ttft_s, total_s, answer.text)


async def _read(response: httpx.Response, answer: ChatAnswer, began_s: float) -> Json:
    """What the chunks add up to, in `answer`; the usage."""
    parser, is_done = EventParser(), False
    usage: Json = {}
    async for piece in response.aiter_raw():
        passed_s = time.perf_counter() - began_s
        for event in parser.feed(piece):
            if is_done:
                raise _MalformedError("something follows [DONE]")
            is_done = event == "[DONE]"
            if not is_done:
                chunk = _object(event)
                if isinstance(chunk.get("usage"), dict):
                    usage = chunk["usage"]
                _take(chunk, answer, passed_s)
    if not is_done:
        raise _MalformedError("the stream ended without [DONE]")
    if not parser.is_between_events:
        raise _MalformedError("the stream ended in the middle of an event")
    return usage


def _take(chunk: Json, answer: ChatAnswer, passed_s: float) -> None:
    if "error" in chunk:
        raise _FailedError(_error_text(chunk["error"]))
    answer.prompt_ids = answer.prompt_ids or chunk.get("prompt_token_ids") or []
    choices = chunk.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise _MalformedError("a chunk has no list of at most one choice")
    for choice in choices:
        if answer.finish_reason:
            raise _MalformedError("a choice follows the one with finish_reason")
        text = _text_of(choice)
        reason = choice.get("finish_reason")
        if text or _thinks(choice) or reason:
            answer.ttft_s = answer.ttft_s or passed_s
            answer.total_s = passed_s
        answer.text += text
        answer.output_ids += choice.get("token_ids") or []
        answer.finish_reason = reason or ""


def _thinks(choice: Json) -> bool:
    """Reasoning and calls are generated too, and are not part of the text."""
    delta = choice.get("delta")
    return isinstance(delta, dict) and bool(
        delta.get("reasoning_content") or delta.get("tool_calls")
    )


def _text_of(choice: Json) -> str:
    """Of a chat chunk (delta.content) or of a completion chunk (text)."""
    text = choice.get("text")
    if text is None:
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            raise _MalformedError("a choice has neither delta nor text")
        text = delta.get("content") or ""
    if not isinstance(text, str):
        raise _MalformedError("the text of a chunk is not text")
    return text


def _count_up(answer: ChatAnswer, usage: Json, body: Json) -> None:
    if not answer.finish_reason:
        raise _MalformedError("the stream ended without finish_reason")
    prompt_tokens, cached = _count(usage, "prompt_tokens"), _cached(usage)
    output_tokens = _count(usage, "completion_tokens")
    if output_tokens is not None and output_tokens > body.get("max_tokens", output_tokens):
        raise _MalformedError(f"{output_tokens} tokens came, {body['max_tokens']} were asked for")
    if cached is not None and prompt_tokens is not None and sum(cached.values()) > prompt_tokens:
        raise _MalformedError("more tokens are said to be cached than the prompt has")
    answer.prompt_tokens, answer.output_tokens = prompt_tokens, output_tokens
    answer.cached = cached


def _cached(usage: Json) -> dict[str, int] | None:
    details = usage.get("prompt_tokens_details")
    if not isinstance(details, dict):
        return None
    by_tier = details.get("cached_tokens_by_tier")
    if isinstance(by_tier, dict):
        return {tier: _count(by_tier, tier) or 0 for tier in TIERS if tier in by_tier}
    total = _count(details, "cached_tokens")
    return None if total is None else {ANYWHERE: total}


def _count(found: Json, name: str) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _MalformedError(f"{name} is {value!r}, not a number of tokens")
    return value


def _object(event: str) -> Json:
    try:
        chunk = json.loads(event)
    except ValueError:
        raise _MalformedError(f"a chunk is not JSON: {event[:80]!r}") from None
    if not isinstance(chunk, dict):
        raise _MalformedError(f"a chunk is not an object: {event[:80]!r}")
    return chunk


def _refusal(response: httpx.Response) -> str:
    try:
        text = _error_text(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = response.text[:200].strip()
    return f"{response.status_code} {text}".strip()


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:300]
