"""Block: the memory that CUDA graphs read, filled by two kernels per step.

What differs from step to step lies in columns of one length, and the page numbers behind them. Only
as much of each column is sent as the graph reads: it goes over a link that may be full.

    tokens | drawn | sources | positions | ends | rows | counts | states | ahead
    ╰─ of each token ────────────────────╯

    slots | lengths | firsts | split    of each component

`sources` says where a token is found: among `tokens`, or among those `drawn` by the batch before,
which come from the device itself. `ends` are the places of the tokens whose logits are wanted.
Rows, counts, lengths and firsts are those of pieces (see Tables); slots of tokens; `split` has a
number for each table; `states` are the slots of recurrent layers, of sequences with one token;
`ahead` says how many tokens are to be proposed after each sequence. A
piece that is not there has the length 0, a token that is not there the slot −1: nothing is read for
them, and nothing written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.engine.attention.columns import Column, Columns
from quire.engine.attention.staging import Staging
from quire.engine.batch import Segment
from quire.engine.bridge import Inputs
from quire.engine.kernels.decode import Tables

_SHARED, _OWN = 9, 4
"""Columns of a batch, and of each component."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Segments, cut up: a table has an entry for each piece."""

    segments: Column
    """Whose each of them is."""
    rows: Column
    """Where its first token is in the packed row."""
    counts: Column
    ahead: Column
    """Tokens of its segment behind it."""
    is_single: npt.NDArray[np.bool_]
    """It is all of its segment, one token."""

    def lengths(self, table: Columns) -> Column:
        """Tokens from a segment's first page to the piece's last token."""
        return table.lengths[self.segments] - self.ahead


def cut(segments: Sequence[Segment], longest: int) -> Pieces:
    """Into pieces of so many tokens at most."""
    sizes = np.fromiter((len(segment.tokens) >> 2 for segment in segments), np.int32)
    if int(sizes.max()) <= longest:  # as most are: each is one piece
        firsts = np.cumsum(sizes, dtype=np.int32) - sizes
        every = np.arange(len(sizes), dtype=np.int32)
        return Pieces(every, firsts, sizes, np.zeros_like(sizes), sizes == 1)
    numbers = -(-sizes // longest)
    of = np.repeat(np.arange(len(sizes), dtype=np.int32), numbers)
    firsts = np.cumsum(numbers, dtype=np.int32) - numbers
    done = (np.arange(len(of), dtype=np.int32) - firsts[of]) * longest
    left = sizes[of] - done
    counts = np.minimum(left, longest)
    rows = (np.cumsum(sizes, dtype=np.int32) - sizes)[of] + done
    return Pieces(of, rows, counts, left - counts, sizes[of] == 1)


class Group(NamedTuple):
    """Entries that are one table."""

    first: int
    size: int
    max_count: int
    """Tokens of a piece, at most."""
    max_splits: Mapping[str, int]
    """By component."""


class Sequences(NamedTuple):
    """Of a batch, int32 on the device. One that is not there has the count and the length 0."""

    rows: torch.Tensor
    """Where its first token is in the packed row."""
    counts: torch.Tensor
    ahead: torch.Tensor
    lengths: torch.Tensor
    """Tokens in its pages, the batch's own included."""
    firsts: torch.Tensor
    """Where its page numbers begin in `pages`, which has those of all."""
    pages: torch.Tensor


class Block:
    def __init__(
        self, components: Sequence[str], capacity: int, num_pages: int, device: torch.device
    ) -> None:
        """`capacity`: tokens, or pieces, of the largest batch; `num_pages` of all its segments."""
        self.components = components
        self._capacity = capacity
        self._columns = (_SHARED + _OWN * len(components)) * capacity
        self._there = torch.zeros(self._columns + num_pages, dtype=torch.int32, device=device)
        self._staging = Staging(device)
        for nowhere in (self._shared(7), *(self._own(name, 0) for name in components)):
            self._there[nowhere] = -1

    def inputs(self, num_tokens: int, num_rows: int | None) -> Inputs:
        """Of the first so many tokens; None: all their logits are wanted. It launches an
        operation, which belongs into the graph."""
        known = self._there[: 2 * self._capacity]
        sources, positions, ends, states = (
            self._there[self._shared(which)] for which in (2, 3, 4, 7)
        )
        return Inputs(
            known.index_select(0, sources[:num_tokens]),
            positions[:num_tokens],
            None if num_rows is None else ends[:num_rows],
            states[:num_tokens],
        )

    def sequences(self, component: str, count: int) -> Sequences:
        """The first so many, of batches in which each is one piece."""
        rows, counts, ahead = (self._there[self._shared(which)][:count] for which in (5, 6, 8))
        lengths, firsts = (self._there[self._own(component, which)][:count] for which in (1, 2))
        return Sequences(rows, counts, ahead, lengths, firsts, self._there[self._columns :])

    def slots(self, component: str, num_tokens: int) -> torch.Tensor:
        return self._there[self._own(component, 0)][:num_tokens]

    def tables(self, component: str, groups: Sequence[Group]) -> list[Tables]:
        found = []
        for number, group in enumerate(groups):
            some = slice(group.first, group.first + group.size)
            rows, counts = (self._there[self._shared(which)][some] for which in (5, 6))
            lengths, firsts = (self._there[self._own(component, which)][some] for which in (1, 2))
            split = self._there[self._own(component, 3)][number : number + 1]
            pages = self._there[self._columns :]
            most = group.max_splits[component]
            found.append(Tables(rows, counts, lengths, firsts, pages, split, most, group.max_count))
        return found

    def takes(self, tables: Mapping[str, Columns], drawn: torch.Tensor | None) -> bool:
        num_pages = sum(len(table.pages) for table in tables.values())
        fits = self._columns + num_pages <= len(self._there)
        return fits and (drawn is None or len(drawn) <= self._capacity)

    def fill(
        self,
        segments: Sequence[Segment],
        pieces: Pieces,
        places: Column,
        tables: Mapping[str, Columns],
        splits: Mapping[str, Sequence[int]],
        *,
        width: int,
    ) -> None:
        """`places`: the entry of each piece; `splits`: by component, of each table; `width`: so
        many of each column are read."""
        num_pages = sum(len(table.pages) for table in tables.values())
        shared = self._there[: self._columns].view(-1, self._capacity)[:, :width]
        behind = self._there[self._columns : self._columns + num_pages]
        with self._staging.filling(shared, behind) as (columns, pages):
            columns[:] = 0
            self._fill_tokens(columns, segments)
            columns[5, places], columns[6, places] = pieces.rows, pieces.counts
            first = 0
            for component, table in tables.items():
                own = self._place(component)
                slots, lengths, firsts, split = columns[own : own + _OWN]
                split[: len(splits[component])] = splits[component]
                slots[: len(table.slots)], slots[len(table.slots) :] = table.slots, -1
                lengths[places] = pieces.lengths(table)
                firsts[places] = table.firsts[pieces.segments] + first
                pages[first : first + len(table.pages)] = table.pages
                first += len(table.pages)

    def follow(self, drawn: torch.Tensor) -> None:
        """What the batch before drew; after `fill`."""
        self._there[self._shared(1)][: len(drawn)].copy_(drawn)

    def _fill_tokens(self, columns: Column, segments: Sequence[Segment]) -> None:
        tokens, _, sources, positions, ends, _, _, states, ahead = columns[:_SHARED]
        sizes, starts, follows, wanted, own_states, own_ahead = np.array(
            [
                (len(s.tokens) >> 2, s.start, s.follows, s.row is not None, s.state, s.ahead)
                for s in segments
            ],
            dtype=np.int32,
        ).T
        behind = np.cumsum(sizes, dtype=np.int32)
        count = int(behind[-1])
        places = np.arange(count, dtype=np.int32)
        tokens[:count] = np.frombuffer(b"".join(segment.tokens for segment in segments), "<i4")
        positions[:count] = places + np.repeat(starts + sizes - behind, sizes)
        sources[:count] = places
        known = follows >= 0
        sources[behind[known] - 1] = follows[known] + self._capacity
        states[len(segments) :] = -1
        states[: len(segments)] = own_states
        ahead[: len(segments)] = own_ahead
        last = (behind - 1)[wanted.astype(np.bool_)]
        ends[: len(last)] = last

    def _shared(self, which: int) -> slice:
        return slice(which * self._capacity, (which + 1) * self._capacity)

    def _own(self, component: str, which: int) -> slice:
        """Of a component. 0: slots, 1: lengths, 2: firsts, 3: split."""
        return self._shared(self._place(component) + which)

    def _place(self, component: str) -> int:
        """Of its first column."""
        return _SHARED + _OWN * self.components.index(component)
