"""One request's choices, each from the engine's tokens to pieces of text.

    async with run(service, work) as pieces:        # leaving early aborts all of them
        async for piece in pieces: ...

Each choice runs in a task of its own, and their pieces come out in the order in which they are
made. A stop string ends a choice here, and so does the first call where only one is wanted: leaving
the engine's block aborts it there. Knows token ids and text, nothing of the JSON they travel in.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from quire.engine.messages import Finish, Output, SamplingParams
from quire.errors import EngineError
from quire.server.planning import Choice, Work
from quire.server.recorder import Asked
from quire.server.service import Service
from quire.server.telling import Answered, log_answer, trace_answer
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
