"""NgramDraft: tokens proposed by looking them up in the request's own text.

What followed the latest earlier occurrence of the last n tokens is proposed, for the longest n that
has occurred before:

    text     … a b c d e … a b c
                   ▲         ╰┴┴─ the last three tokens
                   └───────────── proposed: d e …

For every n there is a table from hash to the place behind the latest occurrence, in two layers:

    recent    a dict: n-grams of the last tokens, one entry each
    settled   all before them: hashes in order, found by bisection. A prompt goes there at once, and
              what is recent joins it when it has grown to a share of the whole.

So a token costs the same however long the text is, and nothing is read twice. Tokens are compared
before anything is proposed: a hash that two n-grams share costs a proposal, never a wrong one.

Knows tokens; nothing of models, and not how many proposals are worth it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LEAST_RECENT = 512
_RECENT_SHARE = 8
"""What is recent is settled when it is an eighth of the whole."""

Hashes = NDArray[np.uint64]


class NgramDraft:
    """One request's. Tokens are numbers below 2³¹."""

    def __init__(
        self,
        prompt: Iterable[int] | NDArray[np.int32] = (),
        *,
        longest: int = 4,
        shortest: int = 2,
        max_tokens: int = 1 << 20,
    ) -> None:
        """`max_tokens`: what stands behind so many is not entered, so that memory has a bound
        (about 20 bytes a token and n-gram); what was entered stays."""
        assert 1 <= shortest <= longest
        self._longest, self._shortest = longest, shortest
        self._max_tokens = max_tokens
        self._tokens = array("i")
        self._num_settled = 0
        """N-grams with a token behind them, up to this place, are settled; from there on recent."""
        self._num_entered = 0
        num_sizes = longest - shortest + 1
        self._recent: list[dict[int, int]] = [{} for _ in range(num_sizes)]
        self._settled = [_Settled(np.zeros(0, np.uint64), 0) for _ in range(num_sizes)]
        self.extend(prompt)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int] | NDArray[np.int32]) -> None:
        """These come next."""
        if isinstance(tokens, np.ndarray):
            self._tokens.frombytes(tokens.astype(np.int32).tobytes())
        else:
            self._tokens.extend(tokens)
        # Behind the last token nothing is known yet.
        end = min(len(self._tokens), self._max_tokens) - 1
        if end - self._num_settled > max(_LEAST_RECENT, end // _RECENT_SHARE):
            self._settle(end)
        for place in range(self._num_entered + 1, end + 1):
            for index, hashed in enumerate(self._hashes_at(place)):
                self._recent[index][hashed] = place
        self._num_entered = max(end, self._num_entered)

    def propose(self, max_tokens: int) -> list[int]:
        """Up to so many tokens that may come next; none if the last ones are new."""
        if max_tokens <= 0:
            return []
        tokens, end = self._tokens, len(self._tokens)
        hashes = list(self._hashes_at(end))
        for index in range(len(hashes) - 1, -1, -1):
            size = self._shortest + index
            place = self._recent[index].get(hashes[index])
            if place is None:
                place = self._settled[index].find(hashes[index])
            if place is not None and tokens[place - size : place] == tokens[end - size :]:
                return self._following(place, max_tokens)
        return []

    def _following(self, place: int, count: int) -> list[int]:
        """Beyond the end of the text, what was proposed itself: a b a b is gone on with as a b."""
        following = self._tokens[place : place + count].tolist()
        while len(following) < count:
            following += following[: count - len(following)]
        return following

    def _hashes_at(self, place: int) -> Iterable[int]:
        """Of the n-grams that end there, the shortest first; those only that fit before it."""
        hashed, tokens = 0, self._tokens
        for size in range(1, min(self._longest, place) + 1):
            hashed = ((hashed ^ tokens[place - size]) * _FACTOR + size) & _MASK
            if size >= self._shortest:
                yield hashed

    def _settle(self, end: int) -> None:
        """All n-grams that end at `end` or before."""
        tokens = np.frombuffer(self._tokens, np.int32)[:end].astype(np.uint64)
        hashed = np.zeros(end, np.uint64)
        for size in range(1, min(self._longest, end) + 1):
            # Entry i is about the n-gram that ends at place i + size.
            hashed = hashed[1:] if size > 1 else hashed
            hashed = (hashed ^ tokens[: len(hashed)]) * np.uint64(_FACTOR) + np.uint64(size)
            if size >= self._shortest:
                self._settled[size - self._shortest] = _Settled(hashed, size)
        for recent in self._recent:
            recent.clear()
        self._num_settled = self._num_entered = end


class _Settled:
    """From hash to the latest place, for hashes of consecutive places."""

    def __init__(self, hashes: Hashes, first_place: int) -> None:
        backwards = hashes[::-1]
        # The first occurrence, backwards, is the latest.
        self._hashes, first = np.unique(backwards, return_index=True)
        self._places = (first_place + len(hashes) - 1 - first).astype(np.int32)

    def find(self, hashed: int) -> int | None:
        at = int(np.searchsorted(self._hashes, np.uint64(hashed)))
        if at < len(self._hashes) and int(self._hashes[at]) == hashed:
            return int(self._places[at])
        return None
