"""What is asked: questions of files, as a chat model is asked them; or tokens drawn from a seed.

*.jsonl    one object a line: `turns` (the first is asked), or `input` (its end, if it is long)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench import TokenArray
from quire.bench.jsonlines import read_rows, wrong_line
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptSet:
    name: str
    prompts: list[TokenArray]


def read_workload(
    name: str, files: Sequence[Path], tokenizer: Any, *, count: int, max_tokens: int
) -> PromptSet:
    """`count` prompts, spread over the files, of `max_tokens` at most. Raises ConfigError."""
    texts = [_read(file) for file in files]
    each = -(-count // len(texts))
    chosen = [text for own in texts for text in _spread(own, each)][:count]
    return PromptSet(name, [_asked(tokenizer, text, max_tokens) for text in chosen])


def random_workload(vocab_size: int, *, count: int, max_tokens: int, seed: int = 0) -> PromptSet:
    chance = np.random.default_rng(seed)
    shape = (count, max_tokens)
    return PromptSet("random", list(chance.integers(0, vocab_size, shape, dtype=np.int32)))


def _read(file: Path) -> list[str]:
    texts = []
    for number, row in read_rows(file):
        turns = row.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else row.get("input")
        if not isinstance(text, str):
            raise wrong_line(file, number, "has no text as `turns` or `input`")
        texts.append(text)
    if not texts:
        raise ConfigError(f"{file} is empty: give a file with questions")
    return texts


def _spread(texts: list[str], count: int) -> list[str]:
    """So many of them, evenly."""
    places = np.linspace(0, len(texts) - 1, min(count, len(texts)))
    return [texts[int(place)] for place in places]


def _asked(tokenizer: Any, text: str, max_tokens: int) -> TokenArray:
    def tokens_of(content: str) -> list[int]:
        message = [{"role": "user", "content": content}]
        made: list[int] = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        return made

    tokens = tokens_of(text)
    if len(tokens) > max_tokens:  # its end: what is to be answered
        kept = tokenizer(text, add_special_tokens=False)["input_ids"][len(tokens) - max_tokens :]
        tokens = tokens_of(tokenizer.decode(kept))
    return np.array(tokens[-max_tokens:], dtype=np.int32)
