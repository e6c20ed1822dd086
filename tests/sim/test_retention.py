"""Retention and quotas under random pressure, in virtual time: what was promised is found, and
nobody pays for another. By seed, over all mixes of state, orders of eviction, and tiers.

Who breaks a promise here is told by what a user would notice: a prefix that is not found.
"""

from __future__ import annotations

from random import Random

import pytest

from quire.eviction import EvictionKind
from quire.keys import PrefixKey
from quire.manager import Wish
from support import MIXES, Rig, namespace, tokens_for

PAGES = 64
"""Of a tier."""
DOC = 4


def doc(tenant: str, seed: int, pages: int = DOC) -> PrefixKey:
    return PrefixKey(namespace(salt=tenant), tokens_for(pages, seed))


def found(rig: Rig, key: PrefixKey) -> int:
    return rig.manager.match(key).num_pages


def world(rng: Random, **options) -> Rig:
    host = rng.choice((0, PAGES, 2 * PAGES))
    return Rig(
        mix=rng.choice(MIXES),
        device=PAGES,
        host=host,
        store=host > 0 and rng.random() < 0.3,
        eviction=rng.choice(list(EvictionKind)),
        **options,
    )


@pytest.mark.parametrize("seed", range(5))
def test_what_is_retained_is_found_for_as_long_as_was_asked(seed: int) -> None:
    rng = Random(seed)
    rig = world(rng)
    until: dict[int, float] = {}
    most = PAGES // 4 // DOC - 1  # a share of the tier, and no more of it than is asked for
    for number in range(40):
        rig.now += rng.random() * 4
        held = [each for each, end in until.items() if end > rig.now]
        luck = rng.random()
        if luck < 0.15 and len(held) < most:
            retain_s = rng.choice((5.0, 20.0, 60.0))
            rig.cache(doc("", number), wish=Wish(retain_s, rng.choice((1, 2))))
            until[number] = rig.now + retain_s
        elif luck < 0.3 and held:
            again = rng.choice(held)
            rig.cache(doc("", again), wish=Wish(60.0, 1))
            until[again] = rig.now + 60.0
        else:
            for i in range(rng.randrange(1, 12)):
                wish = rng.choice((None, None, Wish(level=-1, retain_s=300.0)))
                rig.cache(doc("", 10_000 + 100 * number + i, rng.randrange(1, 7)), wish=wish)
        for each, end in until.items():
            if end > rig.now:
                assert found(rig, doc("", each)) == DOC, f"{each} at {rig.now}, until {end}"
    rig.manager.check_invariants()
    assert until, "nothing was asked for"


@pytest.mark.parametrize("seed", range(5))
def test_a_tenant_at_its_quota_costs_nobody_a_page(seed: int) -> None:
    """Two modest tenants have less than their share each; a greedy one asks for everything."""
    rng = Random(1000 + seed)
    rig = world(rng, tenant_share=0.3)
    quota = int(PAGES * 0.3)
    modest = {name: [doc(name, i) for i in range(quota // DOC - 1)] for name in ("ann", "bob")}
    for keys in modest.values():
        for key in keys:
            rig.cache(key)
    for number in range(40):
        rig.now += rng.random()
        rig.cache(
            doc("greedy", number, rng.randrange(1, 9)), wish=rng.choice((None, Wish(60.0, 2)))
        )
        device, _ = rig.manager.pages_of(namespace(salt="greedy"))
        assert device <= quota
        if rng.random() < 0.2:
            rig.cache(rng.choice(modest[rng.choice(("ann", "bob"))]))
    for name, keys in modest.items():
        assert [found(rig, key) for key in keys] == [DOC] * len(keys), name
    rig.manager.check_invariants()
