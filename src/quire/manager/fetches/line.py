"""Line: who waits for the budget, in order of arrival.

The budget is the full pages on the host that operations on their way hold. Nobody is turned away
for want of it: it will be free again. While others wait nobody takes more than half of it at once.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

from quire.config import CacheConfig
from quire.keys import PrefixKey
from quire.manager.fetches.intakes import Intakes


class Turn(enum.Enum):
    SERVED = enum.auto()
    PASSES = enum.auto()
    """It waits, and those behind it need not."""
    WAITS = enum.auto()
    """There is no budget for anybody."""


Claim = tuple[PrefixKey, Callable[[], Turn]]
"""What somebody wants pages of, and what to do when it is its turn."""


class Line:
    def __init__(self, config: CacheConfig, intakes: Intakes) -> None:
        self._config = config
        self._intakes = intakes
        self.claims: deque[Claim] = deque()

    def join(self, key: PrefixKey, serve: Callable[[], Turn]) -> None:
        self.claims.append((key, serve))

    def serve(self) -> None:
        kept: list[Claim] = []
        turn = Turn.SERVED
        while self.claims and turn is not Turn.WAITS:
            claim = self.claims.popleft()
            turn = claim[1]()
            if turn is not Turn.SERVED:
                kept.append(claim)
        self.claims.extendleft(reversed(kept))

    @property
    def is_spent(self) -> bool:
        return self._intakes.inflight_pages >= self._config.max_inflight_pages

    def allowance(self, key: PrefixKey, at: int, num_coming: int = 0) -> int:
        """Full pages of `key` from page `at` on that may be asked for now by one who has so many on
        their way. Those who wait for these very pages are no others: they will share them."""
        limit = self._config.max_inflight_pages
        left = limit - self._intakes.inflight_pages
        if all(other.common_pages(key) > at for other, _ in self.claims):
            return left
        return min(left, max(limit // 2, self._config.threshold_pages) - num_coming)
