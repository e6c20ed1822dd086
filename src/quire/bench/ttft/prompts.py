"""Prompts of an exact length in the served model's tokens, no two beginning alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.bench.prose import Prose
from quire.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CHARS_PER_TOKEN = 8
"""More than any text has: enough is made, then cut."""


class Prompts:
    def __init__(self, model: Path, seed: int) -> None:
        """`model` is a directory with tokenizer.json. Raises ModelError."""
        self._tokenizer = _tokenizer(model)
        self._prose = Prose(seed)

    def next(self, num_tokens: int) -> str:
        """Cut at a token's end; the last word can come out as a token more or less."""
        passage = self._prose.passage(num_tokens * _CHARS_PER_TOKEN)
        encoding = self._tokenizer.encode(passage, add_special_tokens=False)
        assert len(encoding.ids) >= num_tokens, "text with more characters per token than any"
        end: int = encoding.offsets[num_tokens - 1][1]
        return passage[:end]


def _tokenizer(model: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{model} has no tokenizer.json, which prompts of an exact length need: "
            "save the model with a fast tokenizer"
        )
    return Tokenizer.from_file(str(file))
