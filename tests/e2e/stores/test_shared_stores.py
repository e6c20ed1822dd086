"""C32 over stores that a cluster shares, on real servers: the same greedy tokens, from another
engine's pages and after a restart."""

from __future__ import annotations

from contextlib import closing

import pytest

from e2e.exactness import scenarios
from e2e.exactness.rig import engine_rig
from e2e.exactness.subjects import SMOLLM2, TINY_LLAMA, Subject
from quire.store import open_store
from quire.types import Tier
from store_servers import Mooncake

QUICK = ["redis", "mooncake before file+lz4"]
STORES = [*QUICK, "s3", "mooncake", "redis+zstd", "redis before file", "mooncake before s3+lz4"]


LONG = pytest.mark.long


def needs_codecs(name: str) -> None:
    for codec, package in (("zstd", "zstandard"), ("lz4", "lz4.block")):
        if codec in name:
            pytest.importorskip(package, reason="needs the codecs extra")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=LONG) for n in STORES[2:])])
def test_every_tier_gives_the_same_tokens_c32(name: str, store_url) -> None:
    needs_codecs(name)
    scenarios.every_tier(TINY_LLAMA, store_url(name))


@LONG
@pytest.mark.parametrize("name", STORES)
def test_every_tier_of_the_embedded_model_c32(name: str, store_url) -> None:
    needs_codecs(name)
    scenarios.every_tier(SMOLLM2, store_url(name))


@pytest.mark.parametrize("subject", [TINY_LLAMA, pytest.param(SMOLLM2, marks=LONG)], ids=str)
@pytest.mark.parametrize("name", ["redis", "mooncake", pytest.param("s3", marks=LONG)])
def test_of_two_engines_the_second_finds_what_the_first_computed_c32(
    name: str, subject: Subject, store_url
) -> None:
    url, prompts = store_url(name), subject.ask()
    with (
        engine_rig(subject, store=url, **scenarios.WAIT) as first,
        engine_rig(subject, store=url, **scenarios.WAIT) as second,
    ):
        scenarios.ask(subject, first, prompts, "the first, cold")
        first.settle()
        scenarios.ask(subject, second, prompts, "the second, from the store")
        assert second.reused("store") > 0.5 * sum(map(len, prompts))
        second.flush(Tier.DEVICE, Tier.HOST)
        first.flush(Tier.DEVICE, Tier.HOST)
        scenarios.ask(subject, first, prompts, "the first, from the store")
        assert first.reused("store") > 0.5 * sum(map(len, prompts))


@LONG
def test_ranks_that_give_memory_are_a_pool_without_anybody_else_c32(tmp_path) -> None:
    """Each rank of each engine gives a segment, and nobody else does: a second engine finds what
    the first computed; when that ends, what lay in its memory is computed again."""
    pool, prompts = Mooncake(tmp_path, holders=0), TINY_LLAMA.ask()
    options = {"tp": 2, "store": f"{pool.url}&segment=64MiB", **scenarios.WAIT}
    try:
        with engine_rig(TINY_LLAMA, **options) as second:
            with engine_rig(TINY_LLAMA, **options) as first:
                with closing(open_store(pool.url)) as guest:
                    assert guest.stats().capacity_bytes == 4 * (64 << 20)
                scenarios.ask(TINY_LLAMA, first, prompts, "the first, cold")
                first.settle()
                scenarios.ask(TINY_LLAMA, second, prompts, "the second, from the pool")
                assert second.reused("store") > 0.5 * sum(map(len, prompts))
            second.flush(Tier.DEVICE, Tier.HOST)
            scenarios.ask(TINY_LLAMA, second, prompts, "the second, alone")
            second.settle()
    finally:
        pool.stop()
