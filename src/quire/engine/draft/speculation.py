"""Speculation: what is proposed for which request, and what became of it.

Knows requests' tokens and how many proposals pay; neither pages nor models. A request has a Draft
of its own, made when it first decodes and kept through preemption, since its tokens are.

    wants()     how many tokens to propose in its next step; the same until that step is chosen
    propose()   these
    saw()       what the model kept of them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from quire.engine.draft.adaptive import DraftLength, DraftPrice

if TYPE_CHECKING:
    from quire.engine.request import Request


class Proposer(Protocol):
    """One request's."""

    def extend(self, tokens: Sequence[int]) -> None:
        """These come next, whoever proposed them."""

    def propose(self, max_tokens: int) -> list[int]:
        """Up to so many tokens that may come after all that it was told of."""


class Length(Protocol):
    """How many to propose for one request; see DraftLength."""

    def choose(self, price: DraftPrice) -> int: ...

    def saw(self, num_proposed: int, num_accepted: int) -> None: ...


NewProposer = Callable[[npt.NDArray[np.int32]], Proposer]
"""From the tokens so far."""


class Prices(Protocol):
    def price(self, num_requests: int) -> DraftPrice | None:
        """Of a step for so many requests that decode together; None: propose nothing."""

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A step that did nothing but decode took so long."""


@dataclass(slots=True)
class Draft:
    """One request's."""

    proposer: Proposer
    length: Length
    num_known: int
    """Tokens that the proposer was told of."""
    wanted: int | None = None
    """For the step that is chosen next; None: not decided."""


@dataclass(slots=True)
class DraftCounters:
    """By position of a proposal in its draft, from the first on."""

    proposed: list[int]
    accepted: list[int]
    num_drafts: int = 0

    @classmethod
    def of(cls, max_tokens: int) -> DraftCounters:
        return cls([0] * max_tokens, [0] * max_tokens)

    def add(self, num_proposed: int, num_accepted: int) -> None:
        self.num_drafts += 1
        for position in range(num_proposed):
            self.proposed[position] += 1
            self.accepted[position] += position < num_accepted


@dataclass(slots=True)
class Speculation:
    new_proposer: NewProposer
    max_tokens: int
    """Proposed together."""
    prices: Prices
    new_length: Callable[[int], Length] = DraftLength
    counters: DraftCounters = field(init=False)

    def __post_init__(self) -> None:
        self.counters = DraftCounters.of(self.max_tokens)

    def wants(self, request: Request, num_requests: int) -> int:
        """Tokens to propose in its next step, if that serves so many requests together; never more
        than it may still answer with, but for the one that is drawn anyway."""
        room = request.params.max_tokens - request.next_position - 1
        if room <= 0 or request.for_peer:
            return 0
        draft = self._draft_of(request)
        if draft.wanted is None:
            price = self.prices.price(num_requests)
            draft.wanted = draft.length.choose(price) if price is not None else 0
        return min(draft.wanted, room)

    def propose(self, request: Request, max_tokens: int) -> list[int]:
        """For its next step, which is chosen now. All of its tokens are known."""
        draft = self._draft_of(request)
        draft.wanted = None
        if draft.num_known < request.length:
            draft.proposer.extend(request.tokens[draft.num_known : request.length].tolist())
            draft.num_known = request.length
        return draft.proposer.propose(max_tokens)

    def saw(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        draft = self._draft_of(request)
        draft.length.saw(num_proposed, num_accepted)
        self.counters.add(num_proposed, num_accepted)

    def _draft_of(self, request: Request) -> Draft:
        if request.draft is None:
            known = request.tokens[: request.length]
            proposer, length = self.new_proposer(known), self.new_length(self.max_tokens)
            request.draft = Draft(proposer, length, request.length)
        return request.draft
