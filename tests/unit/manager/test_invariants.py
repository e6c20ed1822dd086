"""The bookkeeping is checked in small pieces, and not across a change."""

from __future__ import annotations

import pytest

from quire.errors import InvariantError
from quire.manager.invariants import PIECE
from quire.types import Tier
from support import Rig


def test_a_large_cache_is_checked_in_pieces() -> None:
    """Nothing an engine does when idle takes longer because more is cached."""
    rig = Rig(device=2 * PIECE + 4, host=0, store=False)
    few = sum(1 for _ in rig.manager.checking())
    for seed in range(2 * PIECE):
        rig.manager.release(rig.compute(rig.doc(1, seed)))
    assert sum(1 for _ in rig.manager.checking()) >= few + 8


def test_whatever_happens_shows_in_the_activity(mix: str) -> None:
    """Else an engine would go on with a check whose first half is no longer true."""
    rig = Rig(mix=mix)
    manager, key = rig.manager, rig.doc(4, seed=1)
    seen = {manager.activity}

    def happened() -> None:
        assert manager.activity not in seen
        seen.add(manager.activity)

    lease = rig.acquire(key)
    happened()
    assert rig.grow(lease, key)
    happened()
    rig.step()
    happened()
    manager.release(lease)
    happened()
    rig.run()
    happened()
    manager.flush(Tier.DEVICE)
    happened()


def test_a_page_with_two_owners_is_found_c6() -> None:
    rig = Rig(store=False)
    lease = rig.compute(rig.doc(2, seed=1))
    lease.private_pages = lease.tree_pages
    with pytest.raises(InvariantError, match="two owners"):
        rig.manager.check_invariants()
