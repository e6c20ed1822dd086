"""What the model thinks of a prompt: the log probability of each of its tokens behind those before
it, and the likeliest in its place.

    prompt      t0 t1 t2 … tn
    asked for   t0 │ an answer that is told to be t1 … tn, with log probabilities

So the prompt is computed as an answer would be, some tokens a step, and not taken from the cache;
what was computed stays there, and the answer to the prompt begins with it. The first token has no
probability: nothing is before it. Knows the engine; whole answers only.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from quire.engine.messages import SamplingParams
from quire.errors import EngineError
from quire.server.generation import Work, raise_failure
from quire.server.service import Service
from quire.text.prompting import Prompt
from quire.text.scribe import Scored, finite
from quire.text.vocabulary import Vocabulary
from quire.web.errors import engine_gone


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


def listed(scored: Sequence[Scored], vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """As vLLM's `prompt_logprobs`: one entry per token of the prompt, by token id."""
    return [None, *(_entry(each, vocabulary) for each in scored)]


def _entry(scored: Scored, vocabulary: Vocabulary) -> dict[str, Any]:
    def told(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.label(token)}

    ranks = {token: rank for rank, (token, _) in enumerate(scored.top, 1)}
    found = {str(token): told(token, logprob, ranks[token]) for token, logprob in scored.top}
    own = told(scored.token, scored.logprob, ranks.get(scored.token))
    return found | {str(scored.token): own}


def _offsets(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """Where each token's text begins, in characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found, end = [], 0
    for token in ids:
        found.append(end)
        end += len(decoder.decode(vocabulary.text(token)))
    return found
