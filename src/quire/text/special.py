"""Text that looks like a token with a meaning of its own, taken out of what clients write.

    text of a client ─ clean ─▶ marks in its place ─ the template ─▶ pieces ─▶ token ids
                                                     the template's own special text stays

So a template's own special tokens are all there are: where a message holds, say, <|im_end|>, that
becomes the ten characters it is. Marks hold a secret, so that nobody can write one.

`strict` is for what comes from outside the conversation, such as a tool's output: there also added
tokens that the model reads as marks, such as <tool_call>, though its tokenizer does not call them
special. (Not all added tokens: some tokenizers have one for <b>, which is no more than text.)
Elsewhere these stay tokens, as in stock transformers: people explain them in prompts, and answers
that are sent back hold them.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

from tokenizers import Tokenizer

from quire.text.vocabulary import Vocabulary

MAX_DEPTH = 100
"""Of JSON. Templates and their filters go down by recursion."""


class TooDeep(Exception):
    """JSON within JSON within JSON."""


class SpecialText:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, known: str = "") -> None:
        """`known`: text whose added tokens are marks: the chat template, and what parsers read."""
        self._tokenizer = tokenizer
        self.special = _any_of(vocabulary.special_texts)
        self.marks = _any_of([*vocabulary.special_texts, *vocabulary.mark_texts(known)])

    @functools.cached_property
    def plain(self) -> Tokenizer:
        """Reads no added tokens. A second tokenizer: the switch is not safe among threads."""
        state = json.loads(self._tokenizer.to_str())
        for token in state.get("added_tokens") or ():
            token["special"] = True
        plain = Tokenizer.from_str(json.dumps(state))
        plain.encode_special_tokens = True
        return plain


class Cleaning:
    """Of one prompt."""

    def __init__(self, special: SpecialText) -> None:
        self._special = special
        self._nonce = secrets.token_hex(8)
        self._taken: list[str] = []

    def text(self, text: str) -> str:
        return self._clean(text, self._special.special)

    def strict(self, text: str) -> str:
        return self._clean(text, self._special.marks)

    def deep(self, value: Any, room: int = MAX_DEPTH) -> Any:
        """All text in a JSON value, names too, strictly. Raises TooDeep."""
        if isinstance(value, str):
            return self.strict(value)
        if isinstance(value, list | dict) and not room:
            raise TooDeep
        if isinstance(value, list):
            return [self.deep(each, room - 1) for each in value]
        if isinstance(value, dict):
            return {self.strict(name): self.deep(each, room - 1) for name, each in value.items()}
        return value

    def encode(self, rendered: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of what a template made of clean text."""
        if not self._taken:
            return encode(rendered)
        ids: list[int] = []
        for i, piece in enumerate(re.split(f"\ue000{self._nonce}\\.([0-9]+)\ue001", rendered)):
            if i % 2:
                taken = self._taken[int(piece)]
                ids += self._special.plain.encode(taken, add_special_tokens=False).ids
            elif piece:
                ids += encode(piece)
        return ids

    def _clean(self, text: str, pattern: re.Pattern[str] | None) -> str:
        return text if pattern is None else pattern.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        self._taken.append(match[0])
        return f"\ue000{self._nonce}.{len(self._taken) - 1}\ue001"


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
