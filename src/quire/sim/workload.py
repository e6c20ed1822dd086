"""Workload: conversations whose prompts share, branch, grow and collide.

Few tokens, few system prompts and few namespaces, so that splits, duplicates and equal prompts
under different namespaces are the rule. Knows tokens and sessions; does not know the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from quire.eviction import GO_FIRST, MAX_LEVEL
from quire.keys import Namespace, UnitKind
from quire.manager import Wish
from quire.sim.options import SimOptions, UnitMix

ALPHABET = 3
_NUM_SYSTEM_PROMPTS = 3
_NUM_SESSIONS = 24
"""More than device and host hold together: many come back from the store."""
_MAX_PRIORITY = 3
ARRIVING_TOGETHER = (1, 1, 1, 4)
"""Requests for one prompt, where arrivals do not wait for answers."""


@dataclass(slots=True, eq=False)
class Session:
    namespace: Namespace
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class SimPrompt:
    session: Session
    tokens: tuple[int, ...]
    priority: int
    wish: Wish | None
    """What is to be done with its pages."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that are computed before they are known to be right.

    tokens   [ accepted ···· )[ rejected ··· )
    chosen   [ accepted ···· )[ one )
    """

    tokens: list[int]
    chosen: list[int]
    """What the model says itself: as many of them as it accepts, and the one after those."""

    @property
    def num_accepted(self) -> int:
        return len(self.chosen) - 1


class Workload:
    def __init__(
        self, rng: Random, options: SimOptions, namespaces: list[Namespace] | None = None
    ) -> None:
        self._rng = rng
        self._page_size = options.page_size
        # A request must fit the device beside others, or it could never finish.
        self._max_tokens = min(12, options.device_pages // 2) * options.page_size
        self.namespaces = namespaces or _namespaces(options)
        self._system_prompts = [
            self._random_tokens(options.page_size * rng.randrange(1, 5) + rng.randrange(3))
            for _ in range(_NUM_SYSTEM_PROMPTS)
        ]
        self._sessions = [self._new_session() for _ in range(_NUM_SESSIONS)]

    def next_prompt(self) -> SimPrompt:
        """The next turn of some conversation: it goes on, branches off, or starts anew."""
        rng = self._rng
        index = rng.randrange(_NUM_SESSIONS)
        session = self._sessions[index]
        luck = rng.random()
        if len(session.tokens) > self._max_tokens - 2 * self._page_size or luck < 0.05:
            session = self._sessions[index] = self._new_session()
        elif luck < 0.15:
            kept = session.tokens[: rng.randrange(len(session.tokens) + 1)]
            session = self._sessions[index] = Session(session.namespace, kept)
        asked = self._random_tokens(rng.choice((0, rng.randrange(2 * self._page_size + 1))))
        tokens = (*session.tokens, *asked)
        priority = rng.choice((0, 0, 0, rng.randrange(_MAX_PRIORITY + 1)))
        return SimPrompt(session, tokens, priority, _wish(tokens, len(tokens) // self._page_size))

    def answer(self) -> list[int]:
        """Some generated tokens; now and then none."""
        return self._random_tokens(self._rng.randrange(self._page_size + 2))

    def draft(self, count: int) -> Draft:
        """Some tokens that may be those to come."""
        tokens, accepted = self._random_tokens(count), self._rng.randint(0, count)
        others = [token for token in range(ALPHABET) if token not in tokens[accepted:][:1]]
        return Draft(tokens, [*tokens[:accepted], self._rng.choice(others)])

    def finished(self, prompt: SimPrompt, tokens: list[int]) -> None:
        """The conversation goes on from here, unless another turn did so first."""
        prompt.session.tokens = tokens

    def _new_session(self) -> Session:
        rng = self._rng
        system = rng.choice(self._system_prompts) if rng.random() < 0.9 else []
        return Session(rng.choice(self.namespaces), list(system))

    def _random_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(ALPHABET) for _ in range(count)]


_RETAIN_S = (0.01, 1.0, 60.0)


def _wish(tokens: tuple[int, ...], num_pages: int) -> Wish | None:
    """Now and then somebody asks that pages be kept, or not be. Chosen by the tokens, so that the
    other choices of a seed do not depend on it."""
    rng = Random(hash(tokens))
    if rng.random() < 0.7:
        return None
    level = rng.randrange(GO_FIRST, MAX_LEVEL + 1)
    count = rng.choice((None, rng.randrange(num_pages + 1)))
    tiers = (rng.random() < 0.8, rng.random() < 0.8)
    wish = Wish(rng.choice(_RETAIN_S), level, count, tiers, rng.random() < 0.9)
    if count is None or rng.random() < 0.5:
        return wish
    level, tiers = rng.randrange(GO_FIRST, MAX_LEVEL + 1), (rng.random() < 0.8, rng.random() < 0.8)
    behind = Wish(rng.choice(_RETAIN_S), level, None, tiers, rng.random() < 0.5)
    return wish._replace(then=behind)


def _namespaces(options: SimOptions) -> list[Namespace]:
    kinds = {
        UnitMix.TOKEN: (UnitKind.TOKEN, UnitKind.TOKEN),
        UnitMix.PAIR: (UnitKind.PAIR, UnitKind.PAIR),
        UnitMix.BOTH: (UnitKind.TOKEN, UnitKind.PAIR),
    }[options.units]
    names = [("", ""), ("", "tenant"), ("adapter", "")]
    found = [
        Namespace("model", "float32", options.page_size, kinds[i % 2], adapter, salt)
        for i, (adapter, salt) in enumerate(names)
    ]
    # In BOTH there are two that differ in nothing but their units.
    return [*found, replace(found[0], unit=kinds[1])] if kinds[0] is not kinds[1] else found
