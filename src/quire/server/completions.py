"""/v1/completions: prompts in, their continuations out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from quire.server.answers import Format, Running, Start
from quire.server.callers import Caller
from quire.server.generation import plan, run
from quire.server.protocol import MAX_SEQUENCES, CompletionRequest
from quire.server.scoring import listed, score
from quire.server.service import Service
from quire.text.prompting import Prompt
from quire.text.scribe import Said, Scored
from quire.text.tools import Text
from quire.text.vocabulary import Vocabulary
from quire.web.errors import invalid


class First(NamedTuple):
    """The first token of a prompt: nothing is before it that makes it likely or not."""

    token: int
    offset: int = 0
    logprob: None = None


Echoed = Scored | First


class CompletionFormat(Format):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    shares_prompt = False

    def __init__(
        self,
        vocabulary: Vocabulary,
        echoes: Sequence[str],
        echoed: Sequence[Sequence[Echoed]] = (),
    ) -> None:
        """`echoes`: what each choice's text begins with; empty when nothing is echoed. `echoed`:
        the tokens of that with their probabilities, if they are wanted."""
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._echoed = echoed

    def whole(self, index: int, said: list[Said], scored: list[Scored] | None) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else ""
        text = "".join(each.text for each in said if isinstance(each, Text))
        if not self._echoed or scored is None:
            return self.chunk(Text(echo + text), scored)
        moved = [each._replace(offset=each.offset + len(echo)) for each in scored]
        logprobs = self._logprobs([*self._echoed[index], *moved])
        return {"text": echo + text, "logprobs": logprobs}

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"text": self._echoes[index], "logprobs": None} if self._echoes else None

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        text = said.text if isinstance(said, Text) else ""
        return {"text": text, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: Sequence[Echoed] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        label = self._vocabulary.label
        return {
            "tokens": [label(each.token) for each in scored],
            "token_logprobs": [each.logprob for each in scored],
            "top_logprobs": [
                # The sampled token is always there, so there may be one more than asked for.
                None
                if each.logprob is None
                else {label(token): logprob for token, logprob in each.top}
                | {label(each.token): each.logprob}
                for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }


def start_completion(service: Service, request: CompletionRequest, caller: Caller) -> Start:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        num_sequences = len(request.prompts) * request.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise invalid(
                "n", f"n times the number of prompts is {num_sequences}: at most {MAX_SEQUENCES}"
            )
        with service.admit(num_sequences, request.model, caller.salt(request.cache_salt)):
            prompts = [await _prompt(service, each) for each in request.prompts]
            work = plan(service, request, prompts, caller)
            echoes = await _echoes(service, request, prompts) if request.echo else []
            count, vocabulary = request.num_prompt_logprobs, service.prompting.vocabulary
            found: list[list[Scored]] = []
            if count is not None:
                found = [await score(service, work, prompt, count) for prompt in prompts]
            scores = (
                [] if request.prompt_logprobs is None else [listed(f, vocabulary) for f in found]
            )
            async with run(service, work) as pieces:
                echoed = _echoed(request, prompts, found)
                yield Running(work, CompletionFormat(vocabulary, echoes, echoed), pieces, scores)

    return start


async def _prompt(service: Service, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return await service.prompting.of_text(prompt, service.info)
    return await service.prompting.of_ids(prompt, service.info)


def _echoed(
    request: CompletionRequest, prompts: Sequence[Prompt], found: Sequence[Sequence[Scored]]
) -> list[list[Echoed]]:
    """One per choice."""
    if not (request.echo and request.logprobs is not None):
        return []
    each: list[list[Echoed]] = []
    for prompt, scored in zip(prompts, found, strict=True):
        each.append([First(prompt.ids[0]), *scored])
    return [echoed for echoed in each for _ in range(request.num_choices)]


async def _echoes(
    service: Service, request: CompletionRequest, prompts: Sequence[Prompt]
) -> list[str]:
    """One per choice: texts as they were given, token ids as the text they stand for."""
    texts = [
        given if isinstance(given, str) else await service.prompting.text_of(prompt)
        for given, prompt in zip(request.prompts, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(request.num_choices)]
