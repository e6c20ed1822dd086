"""What a request may hold, field by field; the shapes behind /openapi.json.

Strict: a bool is no number, "1" is no number, NaN and infinity are refused. `null` means that a
field is not given, everywhere.

    fields of OpenAI's that do not change the answer     taken and ignored (user, metadata, …)
    fields of OpenAI's that we do not have               400, unless null or the default
    fields that nobody knows                             ignored, with a warning in the log; with
                                                         `strict` 400 (see incoming.py)

Knows no model: whether a token id exists or a prompt fits is checked in prompting.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from quire.server.caching import CacheControl
from quire.server.forms import (
    LogitBias,
    OnePrompt,
    PromptField,
    ResponseFormat,
    Salt,
    SeedField,
    StopField,
    Timeout,
    TokenId,
)
from quire.text.messages import Messages, TemplateRequest
from quire.text.shapes import Body, has_field, only, wrong

MAX_CHOICES = 16
MAX_SEQUENCES = 128
"""Prompts times choices of one request."""
MAX_STOP_IDS = 64
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
PriorityField = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
MAX_DETOKENIZED = 1 << 20
MAX_CONTINUED = 1 << 20
COMPLETION_TOKENS = 16
"""As many as OpenAI's /v1/completions generates when it is not told how many."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Ignored: padding against eavesdroppers is TLS's business here."""


class GenerationRequest(Body):
    """What chat and completions have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """0 and -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: SeedField | None = None
    stop: StopField = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: Salt = None
    """Requests share cached pages only with requests of the same salt."""
    cache: CacheControl | None = None
    prompt_cache_key: str | None = None
    """Routers send equal ones to one server."""
    prompt_cache_retention: str | None = None
    priority: PriorityField | None = None
    return_token_ids: bool | None = None
    """Those of the prompt and of the answer, beside the text."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Of every token of the prompt, with as many of the likeliest. Not in streams."""
    return_answer_ids: bool | None = None
    """Those of the answer only."""
    continue_token_ids: Annotated[list[TokenId], Field(max_length=MAX_CONTINUED)] | None = None
    """The answer begins with these, told again, and goes on after them: with the seed of the one
    that was broken off, as it would have gone on. For one choice, without logprobs."""
    timeout: Timeout | None = None
    """Seconds; at most the server's own limit."""

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Where no limit is asked for; None: as many as fit."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """None: none are wanted."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _one_answer_is_continued(self) -> Self:
        if self.continue_token_ids and (self.num_choices > 1 or self.num_logprobs is not None):
            raise wrong("is for one choice, without logprobs", param="continue_token_ids")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        """None: none are wanted."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _prompts_are_scored_whole(self) -> Self:
        if self.stream and self.num_prompt_logprobs is not None:
            given = "echo" if self.prompt_logprobs is None else "prompt_logprobs"
            raise wrong("of log probabilities cannot be streamed: leave stream out", param=given)
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise wrong(
                "is for streams: set stream to true or leave it out", param="stream_options"
            )
        return self


class ChatRequest(GenerationRequest, TemplateRequest):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""

    response_format: ResponseFormat = None
    """The schema of the answer; None: it is text."""

    metadata: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    audio: Annotated[Any, *only()] = None
    function_call: Annotated[Any, *only("none")] = None
    functions: Annotated[Any, *only([])] = None
    modalities: Annotated[Any, *only(["text"])] = None
    moderation: Annotated[Any, *only()] = None
    verbosity: Annotated[Any, *only("medium")] = None
    web_search_options: Annotated[Any, *only()] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong(
                "is the old name of max_completion_tokens: give one of them", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("needs logprobs to be true", param="top_logprobs")
        return self


class CompletionRequest(GenerationRequest):
    prompt: PromptField
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: Annotated[Any, *only("")] = None

    @property
    def default_tokens(self) -> int | None:
        return COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise wrong("is not supported other than equal to n: leave it out", param="best_of")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        counts = [each for each in (self.prompt_logprobs, echoed) if each is not None]
        return max(counts, default=None)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or many, each a text or a list of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]
        return prompt


_CHAT = has_field("messages", "array", prompt={"type": "null"})
_NO_CHAT = {"messages": {"type": "null"}}


class TokenizeRequest(TemplateRequest):
    """One of `prompt` and `messages`."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [has_field("prompt", "string", **_NO_CHAT), _CHAT]}
    )

    model: str | None = None
    prompt: OnePrompt = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: as the model's own prompts begin, if not false."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if isinstance(self.prompt, list) or (self.prompt is None) == (self.messages is None):
            raise wrong("(a text) or messages: give one of the two", param="prompt")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED)]


class FlushRequest(Body):
    tiers: Annotated[list[Literal["device", "host", "store"]], Field(min_length=1, max_length=3)]


class StoreRequest(Body):
    url: Annotated[str, Field(min_length=1, max_length=4096)]


class PrefetchRequest(TemplateRequest):
    """One of `prompt` and `messages`."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [has_field("prompt", "string", "array", **_NO_CHAT), _CHAT]}
    )

    prompt: OnePrompt = None
    messages: Messages | None = None
    cache_salt: Salt = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("or messages: give one of the two", param="prompt")
        return self


class KeysRequest(TemplateRequest):
    """A request to chat or completions, of which only the prompt and the salt are looked at."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={"anyOf": [has_field("prompt", "string", "array", **_NO_CHAT), _CHAT]},
    )
    """For its schema: nothing is wrong with the others."""

    prompt: PromptField | None = None
    """Of several, the first one's keys are answered."""
    messages: Messages | None = None
    cache_salt: Salt = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("or messages: give one of the two", param="prompt")
        return self

    @property
    def first_prompt(self) -> str | list[int] | None:
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return prompt
        first = prompt[0]
        return prompt if isinstance(first, int) else first  # type: ignore[return-value]
