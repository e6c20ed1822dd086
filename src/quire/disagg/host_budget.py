"""HostBudget: which hand-overs may go on together, so that each of them can come to its end.

Knows how many host pages there are and how many each needs; not who stands in line. If several
began and did not fit together, each might wait for pages that the others hold.

A full page that several of them need is on the host once, and counts once:

    first of them takes it    one page more is taken        last of them gives it back    one less

so many that share a long prefix go on together. Keys are gone through when a hand-over begins or
ends, and when the next in line is looked at after that: never in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.keys import PrefixKey
from quire.manager import CacheManager
from quire.types import Tier, split_keys

PageCounts = tuple[int, ...]
"""By component."""


@dataclass(slots=True, eq=False)
class PageClaim:
    """What one hand-over takes."""

    need: PageCounts
    keys: set[bytes] = field(default_factory=set)
    """Of the full pages among them."""


def claim_of(need: PageCounts, key: PrefixKey, first: int, last: int) -> PageClaim:
    """`key` spells full pages [first, last)."""
    return PageClaim(need, set(split_keys(key.page_keys(first, last))))


class HostBudget:
    def __init__(self, manager: CacheManager) -> None:
        self._components = manager.components
        self._sizes = [pool.num_pages for pool in manager.pools() if pool.tier is Tier.HOST]
        self.taken: PageCounts = (0,) * len(self._sizes)
        self._users: dict[bytes, int] = {}
        """By key of a full page: how many have taken it."""
        self._looked_at: PageClaim | None = None
        """Whose `more` is known, as long as nothing is taken or given back."""
        self._more: PageCounts = ()

    def need(self, first: int, last: int) -> PageCounts:
        """Of what is to go on after page `last`, and is there before page `first`."""
        spans = [component.span(first, last) for component in self._components]
        return tuple(end - start for start, end in spans)

    def most(self, last: int) -> PageCounts:
        """The most of what is to come up to page `last` and of what was found before it, wherever
        that ends: both are held until all is there.

            ···[ state where the found part ends )[ state at the end )
                                                                     last
        """
        total = []
        for component, end in zip(self._components, self.need(0, last), strict=True):
            start, stop = component.span(0, last - end)
            spare = start > 0 and not component.is_point  # windows are kept with a page to spare
            total.append(end + stop - start + spare)
        return tuple(total)

    def fits(self, pages: PageCounts) -> bool:
        """Do they fit at all?"""
        return all(map(int.__le__, pages, self._sizes))

    def has(self, claim: PageClaim) -> bool:
        """Does it fit beside what is taken? One alone always may."""
        return not any(self.taken) or self.fits(self._with(self.more(claim)))

    def more(self, claim: PageClaim) -> PageCounts:
        """What it takes that nobody has taken yet."""
        if self._looked_at is not claim:
            self._looked_at = claim
            shared = sum(key in self._users for key in claim.keys)
            self._more = (claim.need[0] - shared, *claim.need[1:])
        return self._more

    def take(self, claim: PageClaim) -> None:
        self.taken = self._with(self.more(claim))
        for key in claim.keys:
            self._users[key] = self._users.get(key, 0) + 1
        self._looked_at = None

    def give_back(self, claim: PageClaim) -> None:
        """All that it still has."""
        freed = claim.need[0] - len(claim.keys) + self._leave(claim.keys)
        self.taken = tuple(map(int.__sub__, self.taken, (freed, *claim.need[1:])))

    def give_some_back(self, claim: PageClaim, keys: set[bytes]) -> None:
        """It does not need these full pages any more."""
        keys = keys & claim.keys
        claim.keys -= keys
        claim.need = (claim.need[0] - len(keys), *claim.need[1:])
        self.taken = (self.taken[0] - self._leave(keys), *self.taken[1:])

    def _with(self, pages: PageCounts) -> PageCounts:
        return tuple(map(sum, zip(self.taken, pages, strict=True)))

    def _leave(self, keys: set[bytes]) -> int:
        """Returns how many of these nobody else has."""
        freed = 0
        for key in keys:
            users = self._users[key] - 1
            if users:
                self._users[key] = users
            else:
                del self._users[key]
                freed += 1
        self._looked_at = None
        return freed
