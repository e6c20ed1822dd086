"""Replayed from what goes over the wire, cache events rebuild exactly the pages of each tier."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest

from quire.config import CacheConfig
from quire.engine.kvevents.format import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    told,
)
from quire.keys import chain_keys
from quire.manager import CacheManager, EventBatch
from quire.manager.events import EventBuffer
from quire.manager.inspection import inspect
from quire.sim import SimOptions, UnitMix, simulate
from quire.sim import options as sim_options
from quire.sim.audit import EventMirror
from quire.tree import slot_of
from quire.types import Residency, Tier

FULL = 0


class Router:
    """Somebody else's, who knows nothing but what is told."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = defaultdict(set)
        self.tokens: dict[bytes, bytes] = {}
        """Of the page of that hash, and its parent's hash before them."""

    def hear(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=KvEventBatch).events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved(hashes, medium):
                    assert self.held[medium or ""].issuperset(hashes)
                    self.held[medium or ""].difference_update(hashes)
                case AllBlocksCleared():
                    self.held.clear()

    def _stored(self, event: BlockStored) -> None:
        self.held[event.medium or ""].update(event.block_hashes)
        if event.parent_block_hash is None:
            return
        width = event.block_size * 4
        tokens = np.array(event.token_ids, dtype="<i4").tobytes()
        assert len(tokens) == width * len(event.block_hashes)
        assert chain_keys(event.parent_block_hash, tokens, width, width) == b"".join(
            event.block_hashes
        )

    def compare(self, manager: CacheManager) -> None:
        for tier in Tier:
            ready: set[bytes] = set()
            for node in inspect(manager).nodes():
                holding = node.held[slot_of(FULL, tier)]
                if holding is not None and holding.state is Residency.READY:
                    keys = inspect(manager).tree.keys_of(node)
                    ready.update(keys[at : at + 32] for at in range(0, len(keys), 32))
            assert self.held[MEDIA[tier.name.lower()]] == ready


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [4096, 3])
def test_what_a_router_hears_is_what_the_tiers_hold(
    seed: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little room for events some are lost, and all is told from the beginning."""
    config = partial(CacheConfig, event_tokens=True)
    monkeypatch.setattr(
        sim_options, "CacheConfig", lambda *a, **o: config(*a, **(o | {"event_buffer": capacity}))
    )
    routers: dict[EventBuffer, Router] = defaultdict(Router)
    lost = compared = 0

    def hear_and_compare(mirror: EventMirror, manager: CacheManager) -> None:
        nonlocal compared
        routers[manager.events].compare(manager)
        compared += 1

    def follow(mirror: EventMirror, manager: CacheManager) -> None:
        nonlocal lost
        batch: EventBatch = manager.events.take()
        page_size = manager.config.page_size
        events = told(batch.events, page_size)
        if batch.lost:
            lost += 1
            events = [AllBlocksCleared(), *told(manager.present(), page_size)]
        routers[manager.events].hear(msgspec.msgpack.encode(KvEventBatch(0.0, events)))

    monkeypatch.setattr(EventMirror, "follow", follow)
    monkeypatch.setattr(EventMirror, "compare", hear_and_compare)
    options = replace(SimOptions.from_seed(seed), events=True, units=UnitMix.TOKEN)
    simulate(seed, 300, options)
    assert compared
    assert (lost > 0) == (capacity < 4096)
