"""Held: one request's place in its grammar, and which tokens may come next.

    output    t0 t1 … tn │ p1 p2 …        consumed │ proposed: consumed, asked about, taken back
    masks                m0 m1 m2 …       what may stand at each of the places behind tn

Its place is a function of the output's tokens alone, so it stays with a request that is preempted.
Where the grammar is satisfied the request's own stop ids may come, and no other end does. A grammar
that becomes too complex on the way allows nothing more: `error` says why. Knows no logits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

_WHERE = re.compile(r"^(at )?\d+\(\d+\): |<non-verbose/>")

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Held:
    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocab_size: int,
        ends: Sequence[int],
        stop_ids: Collection[int],
    ) -> None:
        """`matcher`: of this request alone. `ends`: what the matcher takes for the end."""
        self._matcher = matcher
        self._num_bytes = -(-vocab_size // 8)
        self._ends = np.asarray(ends, np.int64)
        self._stops = np.array([i for i in stop_ids if 0 <= i < vocab_size], np.int64)
        self._stop_ids = frozenset(stop_ids)

    @property
    def error(self) -> str:
        return explained(self._matcher.get_error()) if self._matcher.is_error() else ""

    def advance(self, token: int) -> bool:
        """This was drawn. False: it may not stand there; nothing may any more."""
        if token in self._stop_ids:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.consume_token(token))

    def fitting(self, proposed: list[int]) -> list[int]:
        """As many of them as may follow each other."""
        count = self._matcher.validate_tokens(proposed) if proposed else 0
        for i, token in enumerate(proposed[:count]):
            if token in self._stop_ids:
                return proposed[:i]
        return proposed[:count]

    def allowed(self, proposed: Sequence[int] = ()) -> list[bytes]:
        """One bit per token of the vocabulary, lowest first: for the next place, and for the one
        behind each of `proposed`, which fit."""
        masks = [self._mask()]
        consumed = 0
        for token in proposed:
            if not self._matcher.consume_token(token):
                break
            consumed += 1
            masks.append(self._mask())
        if consumed:
            self._matcher.rollback(consumed)
        masks += [bytes(self._num_bytes)] * (1 + len(proposed) - len(masks))
        return masks

    def _mask(self) -> bytes:
        matcher = self._matcher
        found = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error() or len(found) < self._num_bytes:
            return bytes(self._num_bytes)
        mask = np.frombuffer(found, np.uint8, count=self._num_bytes).copy()
        _set(mask, self._ends, to=False)
        if matcher.is_accepting():
            _set(mask, self._stops, to=True)
        return mask.tobytes()


def _set(mask: np.ndarray, tokens: np.ndarray, *, to: bool) -> None:
    bits = (1 << (tokens & 7)).astype(np.uint8)
    if to:
        np.bitwise_or.at(mask, tokens >> 3, bits)
    else:
        np.bitwise_and.at(mask, tokens >> 3, ~bits)


def explained(error: str) -> str:
    """The library's words in one line, without the grammar that it shows behind them."""
    first = (error.strip() or "no reason given").splitlines()[0]
    return _WHERE.sub("", first).strip()[:300]
