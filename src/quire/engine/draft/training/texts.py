"""Text to train on, from files: passages as they stand, and questions for the model to answer.

    *.jsonl    one object a line: `turns` (questions, a list), or `input` (one question, with all
               that was said before it), or `text`
    others     plain text

A directory stands for the files in it. The last tenth of every file is held out for measuring, and
all of those that are named for it. Knows tokenizers; nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

HELD_OUT_SHARE = 0.1
_PIECE_CHARS = 1 << 16
"""Plain text is tokenised in pieces of about so many."""


@dataclass(slots=True)
class TextSource:
    """One file's."""

    name: str
    passages: list[list[int]] = field(default_factory=list)
    """Tokens as they follow each other there; each at most of the wanted length."""
    questions: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.passages and not self.questions


@dataclass(frozen=True, slots=True)
class Texts:
    training: list[TextSource]
    held_out: list[TextSource]


def read_texts(
    paths: Iterable[Path], held_out: Iterable[Path], tokenizer: Any, length: int
) -> Texts:
    """Passages of `length` tokens. Raises ConfigError for a file that is not understood."""
    texts = Texts([], [])
    for path in _files(paths):
        for source, into in zip(_split(_read(path, tokenizer, length)), (texts.training,
                                texts.held_out), strict=True):  # fmt: skip
            if not source.is_empty:
                into.append(source)
    texts.held_out.extend(_read(path, tokenizer, length) for path in _files(held_out))
    if not texts.training:
        raise ConfigError("there is no text to train on: the files given are empty")
    return texts


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix in (".jsonl", ".txt", ".md"))
            if not files:
                raise ConfigError(
                    f"{path} holds no text: give files, or a folder of *.jsonl, *.txt"
                )
            yield from files
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"{path} does not exist: give a text file, a .jsonl file or a folder")


def _read(path: Path, tokenizer: Any, length: int) -> TextSource:
    source = TextSource(path.stem)
    try:
        if path.suffix == ".jsonl":
            text = "\n\n".join(_questions(path, source.questions))
        else:
            text = path.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    tokens = [token for piece in _pieces(text) for token in _tokens(tokenizer, piece)]
    source.passages = [tokens[at : at + length] for at in range(0, len(tokens) - 1, length)]
    return source


def _questions(path: Path, questions: list[str]) -> Iterator[str]:
    """Adds to `questions`; yields what is plain text."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if "turns" in row:
                    questions.extend(str(turn) for turn in row["turns"])
                elif "input" in row:
                    questions.append(str(row["input"]))
                else:
                    yield str(row["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}, line {number}: each line must be a JSON object with `turns`, `input` "
                    "or `text`"
                ) from error


def _split(source: TextSource) -> tuple[TextSource, TextSource]:
    """For training, and held out."""
    passages, questions = (
        len(items) - round(HELD_OUT_SHARE * len(items))
        for items in (source.passages, source.questions)
    )
    return (
        TextSource(source.name, source.passages[:passages], source.questions[:questions]),
        TextSource(source.name, source.passages[passages:], source.questions[questions:]),
    )


def _pieces(text: str) -> Iterator[str]:
    """Cut where lines end: a tokenizer would take minutes for a book at once."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= _PIECE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
