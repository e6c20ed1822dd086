"""A request from its body to its pieces: admitted, made a prompt of, planned and run.

    async with run_chat(service, request, caller) as running:     # nothing is done before
        async for piece in running.pieces: ...

What is wrong with a request is raised on the way in. Leaving the block, however, ends what is still
computed for it, and gives its place in the queue back. Knows nothing of how pieces are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from quire.server.callers import Caller
from quire.server.formats import Echo, First
from quire.server.generation import run, score
from quire.server.planning import Work, plan
from quire.server.requests import MAX_SEQUENCES, ChatRequest, CompletionRequest
from quire.server.service import Service
from quire.text.grammars import hold
from quire.text.prompting import Prompt
from quire.text.scribe import Piece, Scored
from quire.web.errors import invalid


class Running(NamedTuple):
    """A request under way."""

    work: Work
    pieces: AsyncIterator[Piece]
    """Of all choices, until each has finished. Raises ApiError."""
    scores: Sequence[Sequence[Scored]] = ()
    """Of every prompt, its tokens but the first, if `prompt_logprobs` are wanted."""
    echoes: Sequence[Echo] = ()
    """What each choice begins with; none: nothing is echoed."""


@contextlib.asynccontextmanager
async def run_chat(
    service: Service, request: ChatRequest, caller: Caller
) -> AsyncIterator[Running]:
    """Raises ApiError."""
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
    """Raises ApiError."""
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
