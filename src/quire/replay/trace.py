"""Trace: who asked when, for how much, sharing which blocks with whom. No token is in it.

One line of JSON per request, in the format in which Mooncake publishes its traces:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

timestamp   arrival, in milliseconds
hash_ids    one id per block of the prompt; equal ids are equal prefixes up to that block
answer_ids  likewise of the blocks that prompt and answer fill after those, where known

`quire serve --record` writes a first line of its own, which says how many tokens a block has and
what a token weighs. Here one block is one page. Pages are numbered anew, by prefix: two rows name a
page alike if and only if all before it is alike too, whatever the ids of the file promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from quire.decoders import json_decoder
from quire.errors import ConfigError

BLOCK_TOKENS = 512
"""Of a trace that does not say."""


class TraceHeading(msgspec.Struct, frozen=True):
    """The first line of a recorded trace."""

    quire_trace: int
    """Version of the format."""
    block_tokens: int
    bytes_per_token: int = 0
    """Of KV cache; 0: not known."""


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    answer_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float
    num_tokens: int
    """Of the prompt."""
    pages: list[int]
    """Of the prompt, by number."""
    answer_pages: list[int]
    """That the answer adds to them."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    rows: Sequence[TraceRow]
    block_tokens: int = BLOCK_TOKENS
    bytes_per_token: int = 0
    num_distinct: int = field(init=False)
    """Pages, each counted once."""
    num_asked: int = field(init=False)
    """Pages of all prompts together."""

    def __post_init__(self) -> None:
        seen = {page for row in self.rows for page in (*row.pages, *row.answer_pages)}
        object.__setattr__(self, "num_distinct", len(seen))
        object.__setattr__(self, "num_asked", sum(len(row.pages) for row in self.rows))

    @property
    def duration_s(self) -> float:
        return self.rows[-1].at_s - self.rows[0].at_s

    def progress(self, row: TraceRow) -> float:
        """Share of the trace's time that is over when it arrives."""
        return (row.at_s - self.rows[0].at_s) / (self.duration_s or 1.0)

    @property
    def largest(self) -> int:
        """Pages of the longest request."""
        return max(len(row.pages) + len(row.answer_pages) for row in self.rows)


class Numbering:
    """Pages by what they are and all that is before them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def pages(self, ids: Iterable[int], after: int = -1) -> list[int]:
        """Numbers of the pages with these ids, of which the first follows page `after`."""
        found = []
        for each in ids:
            after = self._numbers.setdefault((after, each), len(self._numbers))
            found.append(after)
        return found


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """The first `limit` requests, in the order of their arrival. Raises ConfigError."""
    heading = TraceHeading(1, BLOCK_TOKENS)
    lines: list[TraceLine] = []
    try:
        with path.open("rb") as reading:
            for number, text in enumerate(reading, 1):
                if number == 1 and b'"quire_trace"' in text:
                    heading = json_decoder(TraceHeading).decode(text)
                elif text.strip():
                    lines.append(_line(text))
    except OSError as error:
        raise ConfigError(f"the trace {str(path)!r} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"line {number} of {str(path)!r} is no request of a trace ({error}): each line is JSON "
            'with "timestamp", "input_length", "output_length" and "hash_ids"'
        ) from error
    if heading.quire_trace != 1 or heading.block_tokens < 1:
        raise ConfigError(f"{str(path)!r} was recorded by another version: record it again")
    lines.sort(key=lambda line: line.timestamp)
    return trace_of(path.name, lines[:limit], heading)


def trace_of(name: str, lines: Sequence[TraceLine], heading: TraceHeading) -> Trace:
    """Raises ConfigError."""
    numbering = Numbering()
    rows = []
    for line in lines:
        pages = numbering.pages(line.hash_ids)
        answer = numbering.pages(line.answer_ids, pages[-1] if pages else -1)
        rows.append(TraceRow(line.timestamp / 1000, line.input_length, pages, answer))
    if not any(row.pages for row in rows):
        raise ConfigError(f"{name} holds no request with a whole block: there is nothing to replay")
    return Trace(name, rows, heading.block_tokens, heading.bytes_per_token)


def _line(text: bytes) -> TraceLine:
    line = json_decoder(TraceLine).decode(text)
    if line.timestamp < 0 or line.input_length < 0 or line.output_length < 0:
        raise ValueError("a number is negative")
    return line
