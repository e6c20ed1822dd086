"""One request's choices, each from the engine's tokens to pieces of text.

    work = plan(service, request, prompts)
    async with run(service, work) as pieces:        # leaving early aborts all of them
        async for piece in pieces: ...

Each choice runs in a task of its own, and their pieces come out in the order in which they are
made. A stop string ends a choice here, and so does the first call where only one is wanted: leaving
the engine's block aborts it there. Knows token ids and text, nothing of the JSON they travel in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.engine.messages import CacheWish, Finish, Output, SamplingParams
from quire.errors import EngineError
from quire.server.answered import Answered, log_answer, trace_answer
from quire.server.caching import wish_of
from quire.server.callers import Caller
from quire.server.protocol import GenerationRequest
from quire.server.recorder import Asked
from quire.server.sampling import check_ids, following, max_tokens, sampling_params, seed_of
from quire.server.service import Service
from quire.text.prompting import Prompt
from quire.text.scribe import Piece, Scribe
from quire.text.tools import Tools
from quire.types import RequestId
from quire.web.errors import (
    ApiError,
    engine_gone,
    invalid,
    overloaded,
    shutting_down,
    timed_out,
)

_NO_SCHEMA = "invalid_schema"
ENGINE_GRACE_S = 5.0
"""The engine keeps a request's time; this much later we stop believing that it does."""


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All of one request, ready for the engine."""

    prompts: Sequence[Prompt]
    choices: Sequence[Choice]
    """n for the first prompt, n for the second, …"""
    stops: Sequence[str]
    salt: str
    priority: int
    timeout_s: float
    prefill: Sequence[str] = ()
    """Page servers of prefill servers to ask; empty: those of the configuration."""
    tools: Tools | None = None
    """Of a chat, those that may be called. None: not a chat, all is text."""
    is_one_call: bool = False
    """An answer ends with its first call."""
    cache: CacheWish | None = None
    """What is to be done with the prompts' pages."""
    said: Sequence[int] = ()
    """Tokens that the answer begins with; of one choice."""

    @property
    def num_each(self) -> int:
        """Choices of a prompt."""
        return len(self.choices) // len(self.prompts)

    def prompt_of(self, index: int) -> int:
        """Whose choice that is."""
        return index // self.num_each

    def is_first(self, index: int) -> bool:
        """Whether that is the first choice of its prompt."""
        return index % self.num_each == 0


def plan(
    service: Service,
    request: GenerationRequest,
    prompts: Sequence[Prompt],
    caller: Caller,
    *,
    tools: Tools | None = None,
    is_one_call: bool = False,
    grammar: str = "",
) -> Work:
    """Raises ApiError."""
    said = request.continue_token_ids or ()
    if said and len(prompts) > 1:
        raise ApiError(400, "only one answer can be continued", param="continue_token_ids")
    check_ids("continue_token_ids", said, service.info)
    choices: list[Choice] = []
    for prompt in prompts:
        limit = max_tokens(request, prompt.num_tokens, service.info)
        params = sampling_params(request, service.info, service.prompting, limit)
        if grammar:
            params = following(grammar, params, service.prompting)
        for i in range(request.num_choices):
            seeded = msgspec.structs.replace(params, seed=seed_of(request, i))
            choices.append(Choice(len(choices), prompt, seeded))
    return Work(
        prompts=prompts,
        choices=choices,
        stops=request.stop,
        salt=caller.salt(request.cache_salt),
        priority=request.priority or 0,
        timeout_s=service.timeout_s(request.timeout),
        prefill=caller.prefill,
        tools=tools,
        is_one_call=is_one_call,
        cache=wish_of(request.cache, request.prompt_cache_retention),
        said=said,
    )


@contextlib.asynccontextmanager
async def run(service: Service, work: Work) -> AsyncIterator[AsyncIterator[Piece]]:
    """The pieces of all choices until each has finished. Iterating raises ApiError when one of
    them fails: an answer is whole or it is an error."""
    queue: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async with asyncio.timeout(work.timeout_s + ENGINE_GRACE_S):
                await _follow(service, work, choice, queue)
        except TimeoutError:
            queue.put_nowait(timed_out("the engine did not answer in time"))
        except Exception as error:  # of this request: raised where its pieces are awaited
            queue.put_nowait(error)

    async def pieces() -> AsyncIterator[Piece]:
        num_left = len(work.choices)
        while num_left:
            piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            num_left -= piece.finish is not None
            yield piece

    service.metrics.prompt_tokens.inc(sum(prompt.num_tokens for prompt in work.prompts))
    tasks = [asyncio.create_task(follow(choice)) for choice in work.choices]
    try:
        yield pieces()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    service: Service, work: Work, choice: Choice, queue: asyncio.Queue[Piece | BaseException]
) -> None:
    """One choice, from the engine to the queue."""
    scribe = Scribe(
        service.prompting,
        choice.index,
        choice.prompt,
        stops=work.stops,
        tools=work.tools,
        is_one_call=work.is_one_call,
    )
    timing = service.metrics.timing(service.clock)
    began_s = service.clock()
    answered = Answered(choice.index, choice.prompt.num_tokens, began_s)
    answer: list[int] = list(work.said)
    trace = service.tracer.header() if service.tracer is not None else ""
    if work.said:
        piece = scribe.write(_said(work.said, choice.params))
        _count_calls(service, piece)
        queue.put_nowait(piece)
        if piece.finish is not None:
            return
    try:
        async with service.engine.generate(
            choice.prompt.tokens,
            choice.params,
            salt=work.salt,
            priority=work.priority,
            timeout_s=work.timeout_s,
            prefill=work.prefill,
            cache=work.cache,
            said=np.array(work.said, dtype="<i4").tobytes(),
            trace=trace,
        ) as outputs:
            async for output in outputs:
                raise_failure(service, output)
                answer += output.tokens
                piece = scribe.write(output)
                _count_calls(service, piece)
                if piece.num_tokens or piece.finish is not None:
                    queue.put_nowait(piece)
                timing.tokens(piece.num_tokens)
                answered.output_tokens += len(output.tokens)
                if output.tokens and answered.first_s is None:
                    answered.first_s = service.clock()
                answered.cached = piece.cached or answered.cached
                if piece.cached is not None and work.is_first(choice.index):
                    service.metrics.cached(piece.cached)
                if piece.finish is not None:
                    answered.outcome = "answered"
                    break
    except EngineError as error:  # its queue is full
        answered.outcome = "refused"
        raise engine_gone(str(error)) from error
    except ApiError as error:
        answered.outcome = error.code or "failed"
        raise
    finally:
        _tell(service, answered, trace)
        if service.recorder is not None:
            service.recorder.take(Asked(began_s, choice.prompt.tokens, work.salt, answer))
    timing.done()


def _count_calls(service: Service, piece: Piece) -> None:
    service.metrics.tool_calls.inc(piece.num_calls)
    for reason in piece.malformed:
        service.metrics.malformed_calls.labels(reason).inc()


def _tell(service: Service, answered: Answered, trace: str) -> None:
    """Whoever wants to hear of every answer."""
    if service.config.log_requests:
        log_answer(answered, service.clock())
    if service.tracer is not None:
        trace_answer(answered, service.tracer, trace)


def _said(tokens: Sequence[int], params: SamplingParams) -> Output:
    """As the engine would have told them."""
    finish = None
    if tokens[-1] in params.stop_ids:
        finish = Finish.STOP
    elif len(tokens) >= params.max_tokens:
        finish = Finish.LENGTH
    return Output(RequestId(""), list(tokens), finish=finish)


def raise_failure(service: Service, output: Output) -> None:
    """Raises ApiError if the engine failed on it."""
    match output.finish:
        case Finish.REJECTED:
            service.metrics.turned_away.labels("engine").inc()
            raise overloaded(output.error or "the engine is too busy: try again later", "rejected")
        case Finish.INVALID:
            raise invalid(
                None, f"the schema of the answer cannot be held to: {output.error}", code=_NO_SCHEMA
            )
        case Finish.TIMEOUT:
            raise timed_out(output.error or "the request took longer than it may")
        case Finish.ERROR if service.draining:
            raise shutting_down()
        case Finish.ERROR if service.engine.failure is not None:
            raise engine_gone(service.engine.failure)
        case Finish.ERROR:
            raise ApiError(
                500, output.error or "the engine failed on this request", code="engine_error"
            )
