"""Apart: a page of token units and one of pair units never meet, in any tier (C3).

    device, host   a page that the tree or a request has is of one kind
    store          so is whatever goes by one page key, on any rank, now and later

What somebody reads is compared with what it must be (quire.sim.audit). This finds two kinds in one
place before anybody has read the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.keys import UnitKind
from quire.manager import CacheManager
from quire.manager.inspection import inspect
from quire.sim.content import Oracle, content_of
from quire.sim.report import SimulationError
from quire.sim.store import SimStores
from quire.tree import slot_of
from quire.types import PageIds, PageKey, Tier, page_array

_Place = tuple[int, int]
"""Slot and page."""


class Apart:
    """What kind each page key was of when it was first seen."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._named: dict[PageKey, UnitKind] = {}

    def check(self, manager: CacheManager, stores: SimStores) -> None:
        self._check_pools(manager)
        self._check_stores(stores)

    def _check_pools(self, manager: CacheManager) -> None:
        kinds: dict[_Place, UnitKind] = {}
        for slot, pages, unit in _pages(manager):
            for page in page_array(pages).tolist():
                if kinds.setdefault((slot, page), unit) is not unit:
                    raise SimulationError(f"page {page} of slot {slot} is of tokens and of pairs")

    def _check_stores(self, stores: SimStores) -> None:
        for (key, component, rank), number in stores.objects():
            content = content_of(number, rank, component)
            if content is None:
                continue  # garbage, which whoever reads it finds out
            unit = self._oracle.unit_of(content)
            if self._named.setdefault(key, unit) is not unit:
                raise SimulationError("one key in the store is of tokens and of pairs")


def _pages(manager: CacheManager) -> Iterator[tuple[int, PageIds, UnitKind]]:
    """Pages of the tree, and of requests, by slot."""
    inside = inspect(manager)
    for root in inside.tree.roots.values():
        unit = UnitKind.PAIR if root.page_width > root.page_bytes else UnitKind.TOKEN
        stack = list((root.children or {}).values())
        while stack:
            node = stack.pop()
            stack += (node.children or {}).values()
            for slot, holding in enumerate(node.held):
                if holding is not None:
                    yield slot, holding.pages, unit
    full = slot_of(0, Tier.DEVICE)
    for lease in manager.leases:
        yield full, lease.pages, lease.key.namespace.unit
