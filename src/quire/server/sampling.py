"""A request's fields → the engine's SamplingParams. Knows what each value means, not who asked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from quire.engine.messages import EngineInfo, SamplingParams
from quire.server.protocol import GenerationRequest
from quire.text.prompting import Prompting
from quire.text.reading import ids_named
from quire.web.errors import context_length_exceeded, invalid

_GREEDY_BELOW = 1e-4
"""A temperature under this divides logits beyond what a float holds, and means greedy anyway."""
_MAX_SEED = 1 << 63


def max_tokens(request: GenerationRequest, num_prompt_tokens: int, info: EngineInfo) -> int:
    """What the request may generate: as asked, or what fits. Raises ApiError."""
    room = info.max_context - num_prompt_tokens
    asked = request.token_limit
    if asked is not None and asked > room:
        raise context_length_exceeded(
            "max_tokens",
            info.max_context,
            f"this asks for {num_prompt_tokens + asked}: {num_prompt_tokens} of the prompt and "
            f"{asked} of the answer; shorten the prompt or lower max_tokens",
        )
    if asked is None:
        return room if request.default_tokens is None else min(room, request.default_tokens)
    return asked


def sampling_params(
    request: GenerationRequest, info: EngineInfo, prompting: Prompting, num_tokens: int
) -> SamplingParams:
    """Without a seed: see seed_of. Raises ApiError."""
    defaults = prompting.defaults
    stop_ids = list(request.stop_token_ids or [])
    check_ids("stop_token_ids", stop_ids, info)
    check_ids("logit_bias", list(request.logit_bias), info)
    stop_ids += ids_named(prompting.vocabulary, request.stop)
    if not request.ignore_eos:
        stop_ids += prompting.eos_ids
    temperature = _or(request.temperature, defaults.temperature)
    top_p = _or(request.top_p, defaults.top_p)
    top_k = max(0, defaults.top_k if request.top_k is None else request.top_k)
    if top_p == 0:  # nothing but the likeliest
        top_p, top_k = 1.0, 1
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=min(top_k, info.vocab_size),
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=request.logit_bias,
        stop_ids=sorted(set(stop_ids)),
        logprobs=request.num_logprobs,
    )


def following(grammar: str, params: SamplingParams, prompting: Prompting) -> SamplingParams:
    """The same under a grammar, which ends where the model's own end may come."""
    stop_ids = sorted({*params.stop_ids, *prompting.eos_ids})
    return msgspec.structs.replace(params, grammar=grammar, stop_ids=stop_ids)


def seed_of(request: GenerationRequest, index: int) -> int:
    """The choices of a seeded request differ from each other, and are the same every time."""
    if request.seed is None:
        return secrets.randbelow(_MAX_SEED)
    return (request.seed + index) % _MAX_SEED


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_ids(param: str, ids: Sequence[int], info: EngineInfo) -> None:
    for token in ids:
        if not 0 <= token < info.vocab_size:
            raise invalid(
                param,
                f"{param} holds the token id {str(token)[:20]}: "
                f"this model's are from 0 to {info.vocab_size - 1}",
                code="unknown_token",
            )
