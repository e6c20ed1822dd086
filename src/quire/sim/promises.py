"""Promises: what requests were promised of their pages, and what tenants may cost each other.

    C43  what somebody asked to keep is found until its time is over: as long as all that was asked
         for fitted into what may be retained, it goes when nothing else of its tier may go
    C44  who has its quota, and pages that nobody uses, makes room among its own: no other tenant
         loses a page to it

Both are looked at whenever room was made for somebody, with what was there right before, and C43
after every call and step too. Whether a page was promised follows from what requests said, not from
what the manager made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from quire.keys import PrefixKey
from quire.manager import CacheManager, Lease
from quire.manager.inspection import inspect
from quire.sim.clock import VirtualClock
from quire.sim.report import SimulationError
from quire.tree import NUM_TIERS, Node, PrefixTree, Tenant, may_go
from quire.types import PageIds, Tier, num_pages, split_keys

Reserve = Callable[..., PageIds | None]
"""As Core.reserve."""


class Promise(NamedTuple):
    key: PrefixKey
    """All of it."""
    until_s: float
    asked: tuple[bool, bool]
    """Of which tiers it was."""
    holds: tuple[bool, bool]
    """Of which it holds."""
    num_found: int
    """Pages that were never lost: what comes back was asked for by nobody."""


class _Seen(NamedTuple):
    evicted: list[int]
    """By tier, but for what tenants took of their own."""
    own: int


class Promises:
    def __init__(self, manager: CacheManager, clock: VirtualClock) -> None:
        self._manager = manager
        self._clock = clock
        self._kept: dict[bytes, Promise] = {}
        """By the last page's key."""
        self._seen = self._see()

    def asked(self, lease: Lease) -> None:
        """The request of this lease ends: what it asked for holds from now on."""
        most = max(self._most())
        for _, end, wish in lease.wish.ranges(lease.tail.end) if lease.wish else ():
            last = min(end, most)  # of a range and what lies before it, the head
            if wish.level <= 0 or not last:
                continue
            key, until_s = lease.key[:last], self._clock() + wish.retain_s
            name = key.page_keys(last - 1, last)
            before = self._kept.get(name)
            if before is None or before.until_s < until_s:
                self._kept[name] = Promise(key, until_s, wish.tiers, wish.tiers, self._found(key))

    def accept(self) -> None:
        """What has gone an operator took."""
        self._seen = self._see()
        for key, each in self._kept.items():
            found = min(self._found(each.key), each.num_found)
            self._kept[key] = each._replace(num_found=found)

    def look(self, name: str, of: int | None = None) -> None:
        """An act, or a call, is over. `of`: it made room in this tier. What went from the other
        with it could not have stayed there, which is for C35 to see."""
        before, self._seen = self._seen, self._see()
        lost = [now - then for now, then in zip(self._seen.evicted, before.evicted, strict=True)]
        if of is not None:
            lost[1 - of] = 0
        self._look_at_kept(name, lost, is_own=self._seen.own > before.own)

    def watch(self, reserve: Reserve) -> Reserve:
        """All room that is made for somebody, whatever for."""

        def watched(
            slot: int, count: int, tenant: Tenant | None = None, beside: int = 0
        ) -> PageIds | None:
            tree = inspect(self._manager).tree
            before = {who: each.num_held[slot] for who, each in tree.tenants.items()}
            self.look("whatever came before")
            pages = reserve(slot, count, tenant, beside)
            self.look(f"room for {count} pages", slot % NUM_TIERS)
            if pages is not None and tenant is not None and tenant.name and slot < NUM_TIERS:
                self._look_at_quota(tenant, Tier(slot), count + beside, before)
            return pages

        return watched

    # ---- inside ---------------------------------------------------------------------------------

    def _look_at_quota(self, tenant: Tenant, tier: Tier, more: int, before: dict[str, int]) -> None:
        """`more`: pages that it has, or is to have, and the tree does not know."""
        inside = inspect(self._manager)
        now = {who: each.num_held[tier] for who, each in inside.tree.tenants.items()}
        losers = {who for who, held in before.items() if now.get(who, 0) < held} - {tenant.name}
        has, quota = tenant.num_held[tier] + more, inside.quotas[tier]
        if losers and has > quota:
            idle = self._idle(tier, partial(_is_of, inside.tree, tenant.name))
            if idle:
                raise SimulationError(
                    f"C44: {losers} lost pages of the {tier.name.lower()} to {tenant.name!r}, who "
                    f"has {has} of {quota}, {idle} of them idle"
                )

    def _look_at_kept(self, name: str, lost: list[int], *, is_own: bool) -> None:
        now = self._clock()
        self._kept = {key: each for key, each in self._kept.items() if each.until_s > now}
        pages = [
            {page for each in self._kept.values() if each.asked[tier] for page in _pages(each.key)}
            for tier in Tier
        ]
        fits = [len(pages[tier]) <= most for tier, most in enumerate(self._most())]
        for key, each in self._kept.items():
            # Of more than may be retained some are as any other from then on.
            holds = each.holds[0] and fits[0], each.holds[1] and fits[1]
            found = self._found(each.key)
            if found < each.num_found and not is_own:
                for tier in Tier:
                    idle = self._ordinary(tier, pages[tier]) if lost[tier] else 0
                    if idle and holds[tier]:
                        raise SimulationError(
                            f"C43: {name} left {found} of {each.num_found} pages that are to be "
                            f"kept for {each.until_s - now:.2f} s, and {idle} others could have "
                            f"gone from the {tier.name.lower()}"
                        )
            self._kept[key] = each._replace(holds=holds, num_found=min(found, each.num_found))

    def _most(self) -> list[int]:
        """By tier, full pages that may be retained."""
        retained = inspect(self._manager).tree.standing.retained
        return [retained[tier].max_pages for tier in Tier]

    def _found(self, key: PrefixKey) -> int:
        return self._manager.match(key).num_pages

    def _ordinary(self, tier: Tier, kept: set[bytes]) -> int:
        """Full pages that could go, of which none was to be kept."""
        tree = inspect(self._manager).tree
        return self._idle(tier, lambda node: kept.isdisjoint(split_keys(tree.keys_of(node))))

    def _idle(self, tier: Tier, which: Callable[[Node], bool]) -> int:
        inside = inspect(self._manager)
        inside.tree.stays.catch_up()
        found = 0
        for node in inside.nodes():
            holding = node.held[tier]
            if holding is not None and may_go(holding, tier) and which(node):
                found += num_pages(holding.pages)
        return found

    def _see(self) -> _Seen:
        counters = self._manager.counters
        host = counters.evicted_host_pages + counters.evicted_spare_pages
        return _Seen([counters.evicted_device_pages, host], counters.evicted_own_pages)


def _is_of(tree: PrefixTree, who: str, node: Node) -> bool:
    return _tenant(tree, node) == who


def _tenant(tree: PrefixTree, node: Node) -> str:
    return tree.root_of(node).tenant.name


def _pages(key: PrefixKey) -> list[bytes]:
    return list(split_keys(key.page_keys(0, key.last)))
