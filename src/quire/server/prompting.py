"""Prompting: texts, token ids and chat messages → a Prompt of token ids that fits.

Knows the model's tokenizer and chat template, nothing of HTTP or of sampling. Work that grows with
the prompt is done in threads of its own, so that a long prompt delays neither the event loop nor
the tokens of others.

Text that looks like a special token. In a chat, what the messages say is only text: where it
holds, say, <|im_end|>, that is tokenised as the ten characters it is, so nobody can end their own
turn and begin another's. In a completion the prompt is taken as written and special tokens are
recognised, because that is how a client that brings its own template writes it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from tokenizers import Tokenizer

from quire.engine.messages import EngineInfo
from quire.errors import ModelError
from quire.models import load_tokenizer
from quire.server.errors import context_length_exceeded, invalid
from quire.server.protocol import Message
from quire.server.vocabulary import Vocabulary

_THREADS = 2
_INLINE_CHARS = 2048
"""A prompt this short is tokenised in well under a millisecond."""

Result = TypeVar("Result")


class Prompt(NamedTuple):
    tokens: bytes
    """int32, little-endian."""
    num_tokens: int


class ChatTokenizer(Protocol):
    """What we use of a tokenizer of transformers."""

    backend_tokenizer: Tokenizer
    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class Prompting:
    def __init__(self, tokenizer: ChatTokenizer, eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.vocabulary = Vocabulary(self._backend)
        self.eos_ids = sorted({*_ids(tokenizer.eos_token_id), *eos_ids})
        """Each ends an answer."""
        special = sorted(self.vocabulary.special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._threads = ThreadPoolExecutor(_THREADS, "quire-prompt")

    @classmethod
    def load(cls, directory: str) -> Prompting:
        """From a model's directory. Slow. Raises ModelError."""
        path = Path(directory)
        tokenizer = load_tokenizer(path)
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{directory} has no fast tokenizer: add its tokenizer.json")
        return cls(cast(ChatTokenizer, tokenizer), _eos_of_generation_config(path))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- prompts --------------------------------------------------------------------------------

    async def of_text(self, text: str, info: EngineInfo, *, param: str = "prompt") -> Prompt:
        """Raises ApiError."""
        self._check_chars(len(text), info, param)
        if not text:
            raise invalid(param, f"{param} is empty: give it at least one token")
        prompt = await self._run(len(text), lambda: _packed(self._encode(text, bos=True)))
        return _fitting(prompt, info, param)

    async def of_ids(self, ids: list[int], info: EngineInfo, *, param: str = "prompt") -> Prompt:
        """Raises ApiError."""
        if len(ids) >= info.max_context:  # before looking at each of them
            raise _too_long(len(ids), info, param)

        def pack() -> Prompt | int:
            wrong = next((i for i in ids if not 0 <= i < info.vocab_size), None)
            return _packed(ids) if wrong is None else wrong

        prompt = await self._run(len(ids), pack)
        if isinstance(prompt, int):
            raise invalid(
                param,
                f"{param} holds the token id {str(prompt)[:20]}: "
                f"this model's are from 0 to {info.vocab_size - 1}",
            )
        return _fitting(prompt, info, param)

    async def of_messages(
        self, messages: Sequence[Message], info: EngineInfo, *, param: str = "messages"
    ) -> Prompt:
        """Raises ApiError."""
        if not self._tokenizer.chat_template:
            raise invalid(
                None,
                f"the model {info.name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        num_chars = sum(len(message.content) for message in messages)
        self._check_chars(num_chars, info, param)
        prompt = await self._run(num_chars, lambda: self._chat(messages))
        return _fitting(prompt, info, param)

    async def text_of(self, prompt: Prompt) -> str:
        """A prompt given as token ids, as text."""

        def decode() -> str:
            ids = np.frombuffer(prompt.tokens, dtype="<i4").tolist()
            return b"".join(map(self.vocabulary.text, ids)).decode("utf-8", "replace")

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

    @functools.cached_property
    def _plain(self) -> Tokenizer:
        """Reads no special tokens. A second tokenizer: the switch is not safe among threads."""
        plain = Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _chat(self, messages: Sequence[Message]) -> Prompt:
        # Special text is taken out of the messages, so that the template's own is all there is;
        # marks that nobody can guess say where to put it back, as plain text.
        nonce = secrets.token_hex(8)
        taken: list[str] = []

        def mark(match: re.Match[str]) -> str:
            taken.append(match[0])
            return f"\ue000{nonce}.{len(taken) - 1}\ue001"

        def clean(text: str) -> str:
            return text if self._special is None else self._special.sub(mark, text)

        rendered = self._render([_conversation(message, clean) for message in messages])
        if not taken:
            return _packed(self._encode(rendered, bos=False))
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"\ue000{nonce}\\.([0-9]+)\ue001", rendered)):
            if i % 2:
                ids += self._plain.encode(taken[int(piece)], add_special_tokens=False).ids
            elif piece:
                ids += self._encode(piece, bos=False)
        return _packed(ids)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is somebody else's program
            raise invalid(
                "messages",
                f"the model's chat template does not take these messages: {str(error)[:300]}",
                code="chat_template_error",
            ) from error
        return str(rendered)


def _conversation(message: Message, clean: Callable[[str], str]) -> dict[str, str]:
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if message.role == "developer" else message.role
    fields = {"role": role, "content": clean(message.content)}
    return fields if message.name is None else fields | {"name": clean(message.name)}


def _packed(ids: list[int]) -> Prompt:
    return Prompt(np.asarray(ids, dtype="<i4").tobytes(), len(ids))


def _fitting(prompt: Prompt, info: EngineInfo, param: str) -> Prompt:
    if not prompt.num_tokens:
        raise invalid(param, f"{param} is empty: give it at least one token")
    if prompt.num_tokens >= info.max_context:
        raise _too_long(prompt.num_tokens, info, param)
    return prompt


def _too_long(num_tokens: int, info: EngineInfo, param: str) -> Exception:
    return context_length_exceeded(
        param,
        info.max_context,
        f"this prompt alone is {num_tokens}, with no room for an answer: shorten it",
    )


def _eos_of_generation_config(directory: Path) -> list[int]:
    path = directory / "generation_config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return _ids(config.get("eos_token_id") if isinstance(config, dict) else None)


def _ids(value: object) -> list[int]:
    """A token id, a list of them, or nothing."""
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
