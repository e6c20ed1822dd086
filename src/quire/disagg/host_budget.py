"""HostBudget: which hand-overs may go on together, so that each of them can come to its end.

Knows how many host pages there are and how many each needs; not who stands in line. If several
began and did not fit together, each might wait for pages that the others hold.
"""

from __future__ import annotations

from quire.manager import CacheManager
from quire.types import Tier

Pages = tuple[int, ...]
"""By component."""


class HostBudget:
    def __init__(self, manager: CacheManager) -> None:
        self._components = manager.components
        self._sizes = [pool.num_pages for pool in manager.pools() if pool.tier is Tier.HOST]
        self.taken: Pages = (0,) * len(self._sizes)

    def need(self, first: int, last: int) -> Pages:
        """Of what is to go on after page `last`, and is there before page `first`."""
        spans = [component.span(first, last) for component in self._components]
        return tuple(end - start for start, end in spans)

    def most(self, last: int) -> Pages:
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

    def fits(self, pages: Pages) -> bool:
        """Do they fit at all?"""
        return all(map(int.__le__, pages, self._sizes))

    def has(self, pages: Pages) -> bool:
        """Do they fit beside what is taken? One alone always may."""
        together = tuple(map(sum, zip(self.taken, pages, strict=True)))
        return not any(self.taken) or self.fits(together)

    def take(self, pages: Pages) -> None:
        self.taken = tuple(map(sum, zip(self.taken, pages, strict=True)))

    def give_back(self, pages: Pages) -> None:
        self.taken = tuple(map(int.__sub__, self.taken, pages))
