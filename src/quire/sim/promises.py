"""Promises: what requests were promised of their pages, and what tenants may cost each other.

    C43  what somebody asked to keep is found until its time is over: as long as all that was asked
         for fitted into what may be retained, it goes when nothing else of its tier may go
    C44  who has its quota, and pages that nobody uses, makes room among its own: no other tenant
         loses a page to it

Looked at after every call, with what it was before: `look` raises where the call has broken one.
Whether a page was promised follows from what requests said, not from what the manager made of it.
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
from quire.tree import NUM_TIERS, Node, PrefixTree, may_go
from quire.types import Tier, num_pages, split_keys, tenant_of


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
    held: dict[str, list[int]]
    """By tenant, full pages on the device and on the host."""
    claimed: dict[str, list[int]]
    """The same, with those that are reserved for it."""
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
        wish = lease.wish
        if wish is None or wish.level <= 0:
            return
        last = min(lease.tail.end, max(self._most()))
        last = last if wish.num_pages is None else min(last, wish.num_pages)
        if last:
            key, until_s = lease.key[:last], self._clock() + wish.retain_s
            name = key.page_keys(last - 1, last)
            before = self._kept.get(name)
            if before is None or before.until_s < until_s:
                self._kept[name] = Promise(key, until_s, wish.tiers, wish.tiers, self._found(key))

    def flushed(self) -> None:
        """An operator has taken away what there was."""
        self._seen = self._see()
        for key, each in self._kept.items():
            found = min(self._found(each.key), each.num_found)
            self._kept[key] = each._replace(num_found=found)

    def look(self, name: str, *, quotas: bool) -> None:
        """A call is over. `quotas`: whether what it cost others is looked at."""
        before, self._seen = self._seen, self._see()
        lost = [now - then for now, then in zip(self._seen.evicted, before.evicted, strict=True)]
        for tier in Tier:
            if lost[tier] and quotas:
                self._look_at_tenants(name, tier, before)
        self._look_at_kept(name, lost, is_own=self._seen.own > before.own)

    # ---- inside ---------------------------------------------------------------------------------

    def _look_at_tenants(self, name: str, tier: Tier, before: _Seen) -> None:
        inside, now = inspect(self._manager), self._seen
        losers = {who for who, held in before.held.items() if _at(now.held, who, tier) < held[tier]}
        for who, claimed in now.claimed.items():
            gained = claimed[tier] > _at(before.claimed, who, tier)
            if who and gained and claimed[tier] > inside.quotas[tier] and losers - {who}:
                idle = self._idle(tier, partial(_is_of, who, inside.tree))
                if idle:
                    raise SimulationError(
                        f"C44: {name} cost {losers - {who}} pages of the {tier.name.lower()} for "
                        f"{who!r}, who has {claimed[tier]} of {inside.quotas[tier]}, {idle} idle"
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
        inside, counters = inspect(self._manager), self._manager.counters
        held = {who: each.num_held[:NUM_TIERS] for who, each in inside.tree.tenants.items()}
        claimed = {who: list(each) for who, each in held.items()}
        for lease in self._manager.leases:
            who = tenant_of(lease.key.namespace.salt)
            claimed.setdefault(who, [0, 0])[Tier.DEVICE] += num_pages(lease.private_pages)
        for who, each in inside.tree.tenants.items():
            claimed[who][Tier.HOST] += inside.fetches.coming_for(each)
        own = counters.evicted_own_pages
        host = counters.evicted_host_pages + counters.evicted_spare_pages
        return _Seen(held, claimed, [counters.evicted_device_pages, host], own)


def _at(counts: dict[str, list[int]], who: str, tier: Tier) -> int:
    return counts[who][tier] if who in counts else 0


def _is_of(who: str, tree: PrefixTree, node: Node) -> bool:
    return tree.root_of(node).tenant.name == who


def _pages(key: PrefixKey) -> list[bytes]:
    return list(split_keys(key.page_keys(0, key.last)))
