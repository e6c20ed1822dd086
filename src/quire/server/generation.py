"""A request from its body to its pieces: admitted, made a prompt of, planned and run.

    async with run_chat(service, request, caller) as running:     # nothing is done before
        async for piece in running.pieces: ...

What is wrong with a request is raised on the way in. Leaving the block, however, ends what is still
computed for it, and gives its place in the queue back. Each choice runs in a task of its own, and
their pieces come out in the order in which they are made. A stop string ends a choice here, and so
does the first call where only one is wanted: leaving the engine's block aborts it there. Knows
token ids and text, nothing of the JSON they travel in.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import numpy as np

from quire.engine.messages import Finish, Output, SamplingParams
from quire.errors import EngineError
from quire.server.formats import Echo, First
from quire.server.incoming import Caller
from quire.server.planning import Choice, Work, plan
from quire.server.recorder import Asked
from quire.server.requests import MAX_SEQUENCES, ChatRequest, CompletionRequest
from quire.server.service import Service
from quire.server.telling import Answered, log_answer, trace_answer
from quire.text.grammars import hold
from quire.text.prompting import Prompt
from quire.text.scribe import Called, Piece, Scored, Scribe, finite
from quire.text.vocabulary import Vocabulary
from quire.types import RequestId
from quire.web.errors import (
    ApiError,
    engine_gone,
    invalid,
    overloaded,
    shutting_down,
    timed_out,
)


class Running(NamedTuple):
    """A request under way."""

    work: Work
    pieces: AsyncIterator[Piece]
    """Of all choices, until each has finished. Raises ApiError."""
    scores: Sequence[Sequence[Scored]] = ()
    """Of every prompt, its tokens but the first, if `prompt_logprobs` are wanted."""
    echoes: Sequence[Echo] = ()
    """What each choice begins with; none: nothing is echoed."""


StartedRun = AbstractAsyncContextManager[Running]
"""A request that is begun when the block is entered."""


@contextlib.asynccontextmanager
async def run_chat(
    service: Service, request: ChatRequest, caller: Caller
) -> AsyncIterator[Running]:
    """Raises ApiError, InputError."""
    with service.admit(request.num_choices, request.model, caller.salt(request.cache_salt)):
        conversation = request.conversation(request.messages)
        prompt = await service.prompting.of_chat(conversation, service.info)
        is_one_call = request.parallel_tool_calls is False
        grammar = hold(
            service.prompting.reading,
            conversation,
            request.response_format,
            is_thinking=prompt.is_thinking,
            calls=request.wants_calls,
            is_one_call=is_one_call,
        )
        work = plan(
            service,
            request,
            [prompt],
            caller,
            tools=conversation.schemas if request.wants_calls else {},
            is_one_call=is_one_call,
            grammar=grammar,
        )
        scores = []
        if (count := request.num_prompt_logprobs) is not None:
            scores = [await score(service, work, prompt, count)]
        async with run(service, work) as pieces:
            yield Running(work, pieces, scores)


@contextlib.asynccontextmanager
async def run_completion(
    service: Service, request: CompletionRequest, caller: Caller
) -> AsyncIterator[Running]:
    """Raises ApiError, InputError."""
    num_sequences = len(request.prompts) * request.num_choices
    if num_sequences > MAX_SEQUENCES:
        raise invalid(
            "n", f"n times the number of prompts is {num_sequences}: at most {MAX_SEQUENCES}"
        )
    with service.admit(num_sequences, request.model, caller.salt(request.cache_salt)):
        prompts = [await _prompt(service, each) for each in request.prompts]
        work = plan(service, request, prompts, caller)
        found: list[list[Scored]] = []
        if (count := request.num_prompt_logprobs) is not None:
            found = [await score(service, work, prompt, count) for prompt in prompts]
        scores = found if request.prompt_logprobs is not None else []
        echoes = await _echoes(service, request, prompts, found) if request.echo else []
        async with run(service, work) as pieces:
            yield Running(work, pieces, scores, echoes)


async def _prompt(service: Service, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return await service.prompting.of_text(prompt, service.info)
    return await service.prompting.of_ids(prompt, service.info)


async def _echoes(
    service: Service,
    request: CompletionRequest,
    prompts: Sequence[Prompt],
    found: Sequence[Sequence[Scored]],
) -> list[Echo]:
    """One per choice: texts as they were given, token ids as the text they stand for. `found`:
    scores of the prompts, if they are wanted."""
    echoes: list[Echo] = []
    for i, (given, prompt) in enumerate(zip(request.prompts, prompts, strict=True)):
        text = given if isinstance(given, str) else await service.prompting.text_of(prompt)
        is_scored = request.logprobs is not None
        echoes.append(Echo(text, [First(prompt.ids[0]), *found[i]] if is_scored else ()))
    return [echo for echo in echoes for _ in range(request.num_choices)]


_NO_SCHEMA = "invalid_schema"
ENGINE_GRACE_S = 5.0
"""The engine keeps a request's time; this much later we stop believing that it does."""


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
    for said in piece.said:
        if isinstance(said, Called):
            service.metrics.tool_calls.inc()
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


# ---- what the model thinks of a prompt -----------------------------------------------------------
#
#     prompt      t0 t1 t2 … tn
#     asked for   t0 │ an answer that is told to be t1 … tn, with log probabilities
#
# So the prompt is computed as an answer would be, some tokens a step, and not taken from the cache;
# what was computed stays there, and the answer to the prompt begins with it. The first token has no
# probability: nothing is before it.


async def score(service: Service, work: Work, prompt: Prompt, count: int) -> list[Scored]:
    """Of all tokens but the first; of each also the `count` likeliest. Raises ApiError."""
    ids = prompt.ids
    if len(ids) < 2:
        return []
    params = SamplingParams(max_tokens=len(ids) - 1, temperature=0.0, logprobs=count, told=ids[1:])
    offsets = iter(_offsets(ids, service.prompting.vocabulary)[1:])
    found: list[Scored] = []
    try:
        async with service.engine.generate(
            prompt.tokens[:4],
            params,
            salt=work.salt,
            priority=work.priority,
            timeout_s=work.timeout_s,
        ) as outputs:
            async for output in outputs:
                raise_failure(service, output)
                for token, each in zip(output.tokens, output.logprobs, strict=True):
                    top = zip(each.top_ids, map(finite, each.top_logprobs), strict=True)
                    found.append(Scored(token, next(offsets), finite(each.logprob), list(top)))
    except EngineError as error:  # its queue is full
        raise engine_gone(str(error)) from error
    return found


def _offsets(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Where each token's text begins, in characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found, end = [], 0
    for token in ids:
        found.append(end)
        end += len(decoder.decode(vocabulary.text(token)))
    return found
