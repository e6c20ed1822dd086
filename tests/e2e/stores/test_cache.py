"""The cache over stores that a cluster shares: every tier, restarts, pages lost behind our back,
clearing and detaching, prefill and decode apart. Bytes always right."""

from __future__ import annotations

from contextlib import closing

import pytest

from e2e.disagg import test_exactness as apart
from e2e.exactness.subjects import TINY_LLAMA
from e2e.harness import Engine, doc
from quire.peer.kinds import TransportKind
from quire.store import open_store
from quire.types import Tier, split_keys

LONG = pytest.mark.long
STORES = ["redis", pytest.param("s3", marks=LONG), pytest.param("mooncake", marks=LONG)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize("name", STORES)
def test_a_prefix_comes_from_every_tier_and_survives_a_restart(name, ranks, store_url):
    url, key = store_url(name), doc(12, seed=1)
    with Engine(url, ranks=ranks) as engine:
        assert engine.serve(key) == (0, 0, 0, 12)
        engine.flush(Tier.DEVICE, Tier.HOST)
        assert engine.serve(key) == (0, 0, 12, 0)
        engine.assert_all_pages_come_back()
    with Engine(url, ranks=ranks) as engine:
        assert engine.serve(doc(3, seed=2, shared=key)) == (0, 0, 12, 3)
        engine.assert_all_pages_come_back()


@pytest.mark.parametrize("name", STORES)
def test_a_page_that_is_lost_there_is_a_miss_and_is_repaired_c16_c17(name, store_url):
    url, key = store_url(name), doc(10, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
    lost = split_keys(key.page_keys())[6]
    with closing(open_store(url)) as store:
        (page,) = [item.name for item in store.scan() if item.name.key == lost]
        assert store.quarantine(page)
    with Engine(url) as engine:
        assert engine.serve(key) == (0, 0, 6, 4)
        engine.assert_all_pages_come_back()
        assert engine.serve(key) == (0, 0, 10, 0)


@pytest.mark.parametrize("name", STORES)
def test_a_cleared_store_is_filled_again_c18(name, store_url):
    url, key = store_url(name), doc(6, seed=1)
    with Engine(url) as engine:
        engine.serve(key)
        change = engine.manager.store.clear()
        engine.until(lambda: change.done)
        assert change.error == ""
        assert engine.serve(key) == (6, 0, 0, 0)  # used again, so written again
        engine.flush(Tier.DEVICE, Tier.HOST)
        assert engine.serve(key) == (0, 0, 6, 0)
        engine.assert_all_pages_come_back()


@LONG
@pytest.mark.parametrize("name", ["mooncake", "redis", "s3", "mooncake before s3"])
def test_prefill_and_decode_apart_with_decode_restoring_from_it_c32(name, store_url):
    apart.test_every_tier_and_side_gives_the_same_answer_c25_c30_c31_c32(
        subject=TINY_LLAMA, transport=TransportKind.TCP, store=store_url(name)
    )
