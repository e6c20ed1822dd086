"""Speculation: what is proposed for which request, and what became of it.

Knows requests' tokens and how many proposals pay; neither pages nor models. A request has a Draft
of its own, made when it first decodes and kept through preemption, since its tokens are. There are
two kinds of proposers:

    on the host     looks at the tokens before a step is chosen: what it proposes is in that step
    on the ranks    goes on from what a step computed, right after it: what it proposes comes back
                    with the result, and is in the next step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from quire.engine.branches import cut
from quire.engine.draft.adaptive import DraftLength, DraftPrice

if TYPE_CHECKING:
    from quire.engine.request import Request


_QUIET_AFTER, _LOOK_EVERY = 4, 4


class Proposer(Protocol):
    """One request's."""

    def extend(self, tokens: Sequence[int]) -> None:
        """These come next, whoever proposed them."""

    def propose(self, max_tokens: int) -> list[int]:
        """What may come after all that it was told of: a tree, so many tokens deep at most."""


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
class RequestDraft:
    """One request's."""

    proposer: Proposer
    length: Length
    num_known: int
    """Tokens that the proposer was told of."""
    wanted: int | None = None
    """For the step that is chosen next; None: not decided."""
    num_missed: int = 0
    """Times in a row that nothing was found to propose."""
    num_passed: int = 0
    """Steps since that were chosen without looking."""


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


class Offered:
    """A request's proposals that come from the ranks."""

    def __init__(self, tokens: npt.NDArray[np.int32] | None = None, branches: int = 0) -> None:
        """`branches`: of the trees that they are."""
        self._branches = branches
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        pass  # they were proposed for what came after these

    def offer(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, max_tokens: int) -> list[int]:
        return cut(self._tokens, self._branches, max_tokens)


@dataclass(slots=True)
class Speculation:
    new_proposer: NewProposer
    max_tokens: int
    """Proposed one after the other."""
    prices: Prices
    on_ranks: bool = False
    new_length: Callable[[int], Length] = DraftLength
    branches: int = 0
    """Of the trees that proposals are; 0: they are chains."""
    counters: DraftCounters = field(init=False)

    def __post_init__(self) -> None:
        self.counters = DraftCounters.of(self.max_tokens)

    def needs_tokens(self, request: Request, num_requests: int) -> bool:
        """Must its last token be known before its next step is chosen? Where nothing was found a
        few times, only now and then: the device would wait for us each time."""
        if self.on_ranks:
            return False
        draft = self._draft_of(request)
        if draft.num_missed >= _QUIET_AFTER:
            draft.num_passed = (draft.num_passed + 1) % _LOOK_EVERY
            if draft.num_passed:
                return False
        return self._wants(request, num_requests) > 0

    def propose(self, request: Request, num_requests: int, max_tokens: int) -> list[int]:
        """For its next step, which is chosen now, beside those of so many requests: a tree of so
        many tokens at most. All of its tokens are known."""
        most = min(max_tokens // (1 + self.branches), self._room(request))
        if not self.on_ranks:
            most = min(most, self._wants(request, num_requests))
            self._draft_of(request).wanted = None
        draft = self._draft_of(request)
        if draft.num_known < request.length:
            draft.proposer.extend(request.tokens[draft.num_known : request.length].tolist())
            draft.num_known = request.length
        if most <= 0:
            return []
        proposed = draft.proposer.propose(most)
        draft.num_missed = 0 if proposed else draft.num_missed + 1
        return proposed

    def ahead(self, request: Request, num_requests: int) -> int:
        """How many tokens the ranks are to propose after its next step, which is chosen now."""
        if not self.on_ranks:
            return 0
        wanted = self._wants(request, num_requests)
        self._draft_of(request).wanted = None
        return min(wanted, max(0, self._room(request) - 1))

    def saw(self, request: Request, num_proposed: int, num_accepted: int) -> None:
        draft = self._draft_of(request)
        draft.length.saw(num_proposed, num_accepted)
        self.counters.add(num_proposed, num_accepted)

    def offer(self, request: Request, tokens: list[int]) -> None:
        """The ranks propose these to come next."""
        proposer = self._draft_of(request).proposer
        if isinstance(proposer, Offered):
            proposer.offer(tokens)

    def _wants(self, request: Request, num_requests: int) -> int:
        """The same until it is used."""
        draft = self._draft_of(request)
        if draft.wanted is None:
            price = self.prices.price(num_requests)
            draft.wanted = draft.length.choose(price) if price is not None else 0
        return min(draft.wanted, self._room(request))

    def _room(self, request: Request) -> int:
        """What it may still answer with, but for the token that is drawn anyway."""
        return 0 if request.for_peer else request.params.max_tokens - request.next_position - 1

    def _draft_of(self, request: Request) -> RequestDraft:
        if request.draft is None:
            known = request.tokens[: request.length]
            proposer, length = self.new_proposer(known), self.new_length(self.max_tokens)
            request.draft = RequestDraft(proposer, length, request.length)
        return request.draft
