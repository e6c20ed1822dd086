"""Prompting: texts, token ids and chat messages → a Prompt of token ids that fits.

Knows the model's tokenizer and chat template, nothing of HTTP or of sampling. Work that grows with
the prompt is done in threads of its own, so that a long prompt delays neither the event loop nor
the tokens of others.

In a chat, what clients write is only text (special.py). In a completion the prompt is taken as
written and special tokens are recognised, because that is how a client that brings its own template
writes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from tokenizers import Tokenizer

from quire.engine.messages import EngineInfo
from quire.errors import InputError, ModelError
from quire.models import load_tokenizer
from quire.text.generation_config import (
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
)
from quire.text.messages import Conversation
from quire.text.reading import Reading
from quire.text.special import Cleaning, SpecialText
from quire.text.templates import ChatTemplate, TemplateTokenizer, num_chars_of
from quire.text.tools import AUTO
from quire.text.vocabulary import Vocabulary

_THREADS = 2
_INLINE_CHARS = 2048
"""A prompt this short is tokenised in well under a millisecond."""

Result = TypeVar("Result")


class Prompt(NamedTuple):
    tokens: bytes
    """int32, little-endian."""
    num_tokens: int
    is_thinking: bool = False
    """The template has opened the reasoning: the answer begins within it."""
    opening: str = ""
    """What the answer begins with, which stands at the end of the prompt."""

    @property
    def ids(self) -> list[int]:
        found: list[int] = np.frombuffer(self.tokens, dtype="<i4").tolist()
        return found


class ChatTokenizer(TemplateTokenizer, Protocol):
    backend_tokenizer: Tokenizer
    eos_token_id: Any


class Prompting:
    def __init__(
        self,
        tokenizer: ChatTokenizer,
        eos_ids: Sequence[int] = (),
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        """Raises ConfigError."""
        self._backend = tokenizer.backend_tokenizer
        self.vocabulary = Vocabulary(self._backend)
        self.eos_ids = sorted({*_ids(tokenizer.eos_token_id), *eos_ids})
        """Each ends an answer."""
        self.defaults = defaults or SamplingDefaults()
        self._template = ChatTemplate(tokenizer)
        self.reading = Reading(
            self._template,
            self.vocabulary,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        known = self._template.source + self.reading.marks
        self._special = SpecialText(self._backend, self.vocabulary, known)
        self._threads = ThreadPoolExecutor(_THREADS, "quire-prompt")

    @classmethod
    def load(
        cls,
        directory: str,
        *,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        use_defaults: bool = True,
    ) -> Prompting:
        """From a model's directory. Slow. Raises ModelError, ConfigError."""
        path = Path(directory)
        tokenizer = load_tokenizer(path)
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{directory} has no fast tokenizer: add its tokenizer.json")
        generation = read_generation_config(path)
        return cls(
            cast(ChatTokenizer, tokenizer),
            _ids(generation.get("eos_token_id")),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            defaults=sampling_defaults(generation) if use_defaults else None,
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- prompts --------------------------------------------------------------------------------

    async def of_text(
        self, text: str, info: EngineInfo, *, param: str = "prompt", bos: bool = True
    ) -> Prompt:
        """Raises InputError."""
        self._check_chars(len(text), info, param)
        if not text:
            raise InputError(param, f"{param} is empty: give it at least one token")
        prompt = await self._run(len(text), lambda: _packed(self._encode(text, bos=bos)))
        return _fitting(prompt, info, param)

    async def of_ids(self, ids: list[int], info: EngineInfo, *, param: str = "prompt") -> Prompt:
        """Raises InputError."""
        if len(ids) >= info.max_context:  # before looking at each of them
            raise _too_long(len(ids), info, param)

        def pack() -> Prompt | int:
            wrong = next((i for i in ids if not 0 <= i < info.vocab_size), None)
            return _packed(ids) if wrong is None else wrong

        prompt = await self._run(len(ids), pack)
        if isinstance(prompt, int):
            raise InputError(
                param,
                f"{param} holds the token id {str(prompt)[:20]}: "
                f"this model's are from 0 to {info.vocab_size - 1}",
                code="unknown_token",
            )
        return _fitting(prompt, info, param)

    async def of_chat(
        self, conversation: Conversation, info: EngineInfo, *, param: str = "messages"
    ) -> Prompt:
        """Raises InputError."""
        if not self._template.exists:
            raise InputError(
                None,
                f"the model {info.name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        if conversation.must_call and self.reading.format is None:
            raise InputError(
                "tool_choice",
                "tool_choice asks for a call, and this server reads none (tool_parser is none)",
            )
        num_chars = num_chars_of(conversation)
        self._check_chars(num_chars, info, param)
        prompt = await self._run(num_chars, lambda: self._chat(conversation))
        return _fitting(prompt, info, param)

    async def text_of(self, prompt: Prompt, *, special: bool = False) -> str:
        """A prompt given as token ids, as text; `special` tokens too, by their names."""
        spell = self.vocabulary.name if special else self.vocabulary.text

        def decode() -> str:
            return b"".join(map(spell, prompt.ids)).decode("utf-8", "replace")

        return await self._run(prompt.num_tokens, decode)

    # ---- inside ---------------------------------------------------------------------------------

    def _check_chars(self, num_chars: int, info: EngineInfo, param: str) -> None:
        """Turn away what cannot fit however well it tokenises, before it costs anything."""
        least = num_chars // self.vocabulary.longest
        if least >= info.max_context:
            raise context_length_exceeded(
                param,
                info.max_context,
                f"this prompt of {num_chars} characters is at least {least}: shorten it",
            )

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, text: str, *, bos: bool) -> list[int]:
        # Unlike encode(), the batch call lets go of the interpreter lock while it works.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=bos)
        return encoding.ids

    def _chat(self, conversation: Conversation) -> Prompt:
        cleaning = Cleaning(self._special)
        rendered = self._template.render(conversation, cleaning)
        is_thinking = self.reading.is_thinking(rendered)
        opening = ""
        if conversation.must_call:
            opening = self.reading.opening(conversation.function, is_thinking=is_thinking)
        ids = cleaning.encode(rendered + opening, lambda text: self._encode(text, bos=False))
        return _packed(ids)._replace(is_thinking=is_thinking, opening=opening)


def _packed(ids: list[int]) -> Prompt:
    return Prompt(np.asarray(ids, dtype="<i4").tobytes(), len(ids))


def _fitting(prompt: Prompt, info: EngineInfo, param: str) -> Prompt:
    if not prompt.num_tokens:
        raise InputError(param, f"{param} is empty: give it at least one token")
    if prompt.num_tokens >= info.max_context:
        raise _too_long(prompt.num_tokens, info, param)
    return prompt


def _too_long(num_tokens: int, info: EngineInfo, param: str) -> InputError:
    return context_length_exceeded(
        param,
        info.max_context,
        f"this prompt alone is {num_tokens}, with no room for an answer: shorten it",
    )


def _ids(value: object) -> list[int]:
    """A token id, a list of them, or nothing."""
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def context_length_exceeded(param: str, max_context: int, what: str) -> InputError:
    return InputError(
        param,
        f"the context holds {max_context} tokens, prompt and answer together, and {what}",
        code="context_length_exceeded",
    )
