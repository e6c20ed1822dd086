"""Vocabulary: what each token id stands for, as bytes.

Bytes, because a token may end in the middle of a character. Two families of tokenizers cover the
decoders there are: byte-level BPE, whose alphabet is 256 printable stand-ins for bytes, and
SentencePiece, which writes a space as ▁ and a rare byte as <0x0A>. Any other is asked to decode
each token by itself. Knows nothing of prompts, templates or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = re.compile(r"<\|.+\|>|<\|.+>|<.+\|>|\[[A-Z_]{3,}\]")
_SPACE = "\u2581"


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        decoders = _decoder_types(tokenizer)
        self._is_byte_level = "ByteLevel" in decoders
        self._is_sentencepiece = bool(decoders & {"Metaspace", "ByteFallback"})
        self._byte_of = _byte_alphabet()
        self._names: dict[int, bytes] = {}  # filled as tokens are met; at most the vocabulary
        self.longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        """Characters of the longest token: n characters are at least n / longest tokens."""

    @property
    def special_texts(self) -> list[str]:
        """Written in a prompt, each of these is one token with a meaning of its own."""
        return [token.content for token in self._added.values() if token.special]

    def mark_texts(self, known: str) -> list[str]:
        """Added tokens that a model reads as marks, though not all are called special: those like
        <|fim|>, and those that `known` text has, such as a chat template."""
        return [
            text
            for text in self.added_texts
            if _MARK.fullmatch(text) or (text[0] in "<[" and text in known)
        ]

    @property
    def added_texts(self) -> list[str]:
        return [token.content for token in self._added.values() if token.content.strip()]

    def ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """The added tokens of these texts, as far as there are any."""
        return frozenset(token for token, added in self._added.items() if added.content in texts)

    def id_of(self, text: str) -> int | None:
        """The added token of this text, if there is one."""
        return next((token for token, added in self._added.items() if added.content == text), None)

    def text(self, token: int) -> bytes:
        """What a token adds to the text: nothing, if it is special or unknown."""
        added = self._added.get(token)
        return b"" if added is not None and added.special else self.name(token)

    def name(self, token: int) -> bytes:
        """What a token is called, special ones too."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._spell(token)
        return name

    def label(self, token: int) -> str:
        """For logprobs: the name as text, or as OpenAI writes a part of a character."""
        name = self.name(token)
        try:
            return name.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)

    def _spell(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.content.encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:  # models pad their vocabulary
            return b""
        if self._is_byte_level and all(char in self._byte_of for char in name):
            return bytes(self._byte_of[char] for char in name)
        if self._is_sentencepiece:
            if byte := _BYTE_TOKEN.fullmatch(name):
                return bytes([int(byte[1], 16)])
            return name.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if part}


def _byte_alphabet() -> dict[str, int]:
    """The stand-in of each byte in byte-level BPE: printable Latin-1 for itself, the others from
    U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
