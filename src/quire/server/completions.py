"""/v1/completions: prompts in, their continuations out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quire.server.answers import Format, Running, Start
from quire.server.errors import invalid
from quire.server.generation import plan, run
from quire.server.prompting import Prompt
from quire.server.protocol import MAX_SEQUENCES, CompletionRequest
from quire.server.scribe import Said, Scored
from quire.server.service import Service
from quire.server.tools import Text
from quire.server.vocabulary import Vocabulary


class CompletionFormat(Format):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    shares_prompt = False

    def __init__(self, vocabulary: Vocabulary, echoes: Sequence[str]) -> None:
        """`echoes`: what each choice's text begins with; empty when nothing is echoed."""
        self._vocabulary = vocabulary
        self._echoes = echoes

    def whole(self, index: int, said: list[Said], scored: list[Scored] | None) -> dict[str, Any]:
        echo = self._echoes[index] if self._echoes else ""
        text = "".join(each.text for each in said if isinstance(each, Text))
        return self.chunk(Text(echo + text), scored)

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"text": self._echoes[index], "logprobs": None} if self._echoes else None

    def chunk(self, said: Said | None, scored: list[Scored] | None) -> dict[str, Any]:
        text = said.text if isinstance(said, Text) else ""
        return {"text": text, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: list[Scored] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        label = self._vocabulary.label
        return {
            "tokens": [label(each.token) for each in scored],
            "token_logprobs": [each.logprob for each in scored],
            "top_logprobs": [
                # The sampled token is always there, so there may be one more than asked for.
                {label(token): logprob for token, logprob in each.top}
                | {label(each.token): each.logprob}
                for each in scored
            ],
            "text_offset": [each.offset for each in scored],
        }


def start_completion(
    service: Service, request: CompletionRequest, prefill: Sequence[str] = ()
) -> Start:
    @contextlib.asynccontextmanager
    async def start() -> AsyncIterator[Running]:
        num_sequences = len(request.prompts) * request.num_choices
        if num_sequences > MAX_SEQUENCES:
            raise invalid(
                "n", f"n times the number of prompts is {num_sequences}: at most {MAX_SEQUENCES}"
            )
        with service.admit(num_sequences, request.model, request.cache_salt or ""):
            prompts = [await _prompt(service, each) for each in request.prompts]
            work = plan(service, request, prompts, prefill)
            echoes = await _echoes(service, request, prompts) if request.echo else []
            async with run(service, work) as pieces:
                form = CompletionFormat(service.prompting.vocabulary, echoes)
                yield Running(work, form, pieces)

    return start


async def _prompt(service: Service, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, str):
        return await service.prompting.of_text(prompt, service.info)
    return await service.prompting.of_ids(prompt, service.info)


async def _echoes(
    service: Service, request: CompletionRequest, prompts: Sequence[Prompt]
) -> list[str]:
    """One per choice: texts as they were given, token ids as the text they stand for."""
    texts = [
        given if isinstance(given, str) else await service.prompting.text_of(prompt)
        for given, prompt in zip(request.prompts, prompts, strict=True)
    ]
    return [text for text in texts for _ in range(request.num_choices)]
