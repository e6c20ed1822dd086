"""What is asked of the engine for one request: the prompt of each choice, and how it is sampled.

Knows what each field of a request means; neither who asked nor what becomes of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.engine.messages import CacheWish, EngineInfo, SamplingParams
from quire.server.caching import wish_of
from quire.server.incoming import Caller
from quire.server.requests import GenerationRequest
from quire.server.service import Service
from quire.text.prompting import Prompt, Prompting, context_length_exceeded
from quire.text.reading import ids_named
from quire.text.tools import Tools
from quire.web.errors import ApiError, invalid

_GREEDY_BELOW = 1e-4
"""A temperature under this divides logits beyond what a float holds, and means greedy anyway."""
_MAX_SEED = 1 << 63


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
    """Raises ApiError, InputError."""
    said = request.continue_token_ids or ()
    if said and len(prompts) > 1:
        raise ApiError(400, "only one answer can be continued", param="continue_token_ids")
    _check_ids("continue_token_ids", said, service.info)
    choices: list[Choice] = []
    for prompt in prompts:
        limit = _max_tokens(request, prompt.num_tokens, service.info)
        params = _sampling_params(request, service.info, service.prompting, limit)
        if grammar:
            params = _following(grammar, params, service.prompting)
        for i in range(request.num_choices):
            seeded = msgspec.structs.replace(params, seed=_seed_of(request, i))
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


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, info: EngineInfo) -> int:
    """What the request may generate: as asked, or what fits. Raises InputError."""
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


def _sampling_params(
    request: GenerationRequest, info: EngineInfo, prompting: Prompting, num_tokens: int
) -> SamplingParams:
    """Without a seed: see _seed_of. Raises ApiError."""
    defaults = prompting.defaults
    stop_ids = list(request.stop_token_ids or [])
    _check_ids("stop_token_ids", stop_ids, info)
    _check_ids("logit_bias", list(request.logit_bias), info)
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


def _following(grammar: str, params: SamplingParams, prompting: Prompting) -> SamplingParams:
    """The same under a grammar, which ends where the model's own end may come."""
    stop_ids = sorted({*params.stop_ids, *prompting.eos_ids})
    return msgspec.structs.replace(params, grammar=grammar, stop_ids=stop_ids)


def _seed_of(request: GenerationRequest, index: int) -> int:
    """The choices of a seeded request differ from each other, and are the same every time."""
    if request.seed is None:
        return secrets.randbelow(_MAX_SEED)
    return (request.seed + index) % _MAX_SEED


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_ids(param: str, ids: Sequence[int], info: EngineInfo) -> None:
    for token in ids:
        if not 0 <= token < info.vocab_size:
            raise invalid(
                param,
                f"{param} holds the token id {str(token)[:20]}: "
                f"this model's are from 0 to {info.vocab_size - 1}",
                code="unknown_token",
            )
