"""Which server holds which page: the index alone, and by events and keys over HTTP."""

import asyncio

import pytest

from quire.engine.eventlog import EventLog
from quire.manager import CacheEvent, EventBatch, EventKind
from quire.router.affinity import AffinityIndex
from unit.router.fakes import eventually, key_of, rig

A, B, C = b"a", b"b", b"c"


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


def test_the_longest_prefix_without_a_gap_counts():
    index = AffinityIndex(10)
    index.stored("one", "device", [A, B])
    index.stored("two", "host", [A, C])
    index.stored("three", "host", [B, C])
    assert index.matched([A, B, C]) == {"one": 2, "two": 1}
    assert index.matched([]) == {}
    assert index.matched([C]) == {"two": 1, "three": 1}


def test_a_page_is_gone_when_no_tier_has_it():
    index = AffinityIndex(10)
    index.stored("one", "device", [A])
    index.stored("one", "host", [A])
    index.removed("one", "device", [A, B])
    assert index.matched([A]) == {"one": 1}
    index.removed("one", "host", [A])
    assert index.matched([A]) == {}
    assert len(index) == 0


def test_what_all_share_favours_none():
    index = AffinityIndex(10)
    index.stored("one", "store", [A])
    index.removed("one", "store", [A])
    assert len(index) == 0


def test_a_server_is_forgotten_as_a_whole():
    index = AffinityIndex(10)
    index.stored("one", "device", [A, B])
    index.stored("two", "device", [A])
    index.forget("one")
    assert index.matched([A, B]) == {"two": 1}
    assert len(index) == 1


def test_what_was_not_asked_for_longest_goes_first():
    index = AffinityIndex(2)
    index.stored("one", "device", [A, B])
    index.matched([A])
    index.stored("one", "device", [C])
    assert index.matched([A]) == {"one": 1}
    assert index.matched([B]) == {}


def test_of_half_a_million_pages_a_server_is_forgotten_at_once_and_freed_in_slices():
    index = AffinityIndex(2_000_000)
    keys = [number.to_bytes(32) for number in range(500_000)]
    index.stored("one", "device", keys)
    index.stored("two", "host", keys[:10])
    assert len(index) == 500_010
    assert index.matched(keys) == {"one": 500_000, "two": 10}
    index.forget("one")
    assert len(index) == 10
    assert index.matched(keys) == {"two": 10}
    index.stored("one", "host", keys[:3])  # it is back, while what it had is being freed
    slices = 0
    while index.sweep(1000):
        slices += 1
    assert slices == 499
    assert index.matched(keys) == {"one": 3, "two": 10}


def test_when_it_is_full_the_server_of_which_most_is_known_makes_room():
    index = AffinityIndex(4)
    index.stored("one", "device", [A])
    index.stored("two", "device", [b"1", b"2", b"3", b"4"])
    assert len(index) == 4
    assert index.matched([A]) == {"one": 1}
    assert index.matched([b"1"]) == {}
    assert index.matched([b"2", b"3", b"4"]) == {"two": 3}


# ---- over HTTP -----------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_pages_are():
    async def main():
        async with rig(prefill=2, decode=2, admin_key="root") as router:
            keys = [key_of("x"), key_of("y")]
            for fake in router.decode:
                fake.keys = {"warm": keys}
            router.decode[1].stores("x", "y")
            router.prefill[0].stores("x", tier="host")
            await eventually(lambda: len(router.fleet.index) == 3)
            await eventually(lambda: len(router.fleet.index.matched([bytes.fromhex(keys[0])])) == 2)
            for _ in range(4):
                await router.complete("warm")
            assert [len(fake.seen) for fake in router.decode] == [0, 4]
            for seen in router.decode[1].seen:
                first, second = seen.headers["x-quire-prefill"].split(",")
                assert (first, second) == (router.prefill[0].peer, router.prefill[1].peer)
            choices = "quire_router_choices_total"
            assert await router.metric(choices, side="decode", by="affinity") == 4
            assert await router.metric(choices, side="prefill", by="affinity") == 4
            for _ in range(4):
                await router.complete("cold")
            assert await router.metric(choices, side="decode", by="load") == 4

    run(main)


@pytest.mark.parametrize("api_key", [None, "the router's"])
def test_a_server_is_asked_for_the_keys_of_this_client(api_key):
    """Unless its key is the router's: then the server knows no tenant of that name."""

    async def main():
        async with rig(decode=2, admin_key="root", api_key=api_key) as router:
            router.decode[0].stores("x")
            await eventually(lambda: len(router.fleet.index) == 1)
            key = f"Bearer {api_key or 'sk-alice'}"
            await router.complete(headers={"authorization": key, "x-quire-client": "Bearer sk-bob"})
            (asked,) = [each for fake in router.decode for each in fake.asked_for]
            assert asked == (None if api_key else "Bearer sk-alice")

    run(main)


def test_one_of_each_is_not_asked_for_keys():
    async def main():
        async with rig() as router:
            router.decode[0].stores("x")
            await router.complete()
            assert router.decode[0].num_keys_asked == 0

    run(main)


def test_keys_that_cannot_be_had_cost_nothing_but_affinity():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.keys_refusal = 409
            router.decode[0].stores("x")
            await eventually(lambda: len(router.fleet.index) == 1)
            for _ in range(2):
                assert (await router.complete()).status_code == 200
            assert sum(fake.num_keys_asked for fake in router.decode) == 2
            assert await router.metric("quire_router_keys_failures_total") == 2

    run(main)


def test_events_with_a_gap_and_a_server_that_restarts_begin_anew():
    async def main():
        async with rig(decode=2) as router:
            fake, index = router.decode[0], router.fleet.index
            fake.stores("x")
            await eventually(lambda: len(index) == 1)
            fake.num_forgotten, fake.events = 10, []
            fake.stores("y")
            await eventually(lambda: index.matched([bytes.fromhex(key_of("y"))]) != {})
            assert len(index) == 1
            fake.stores("y", kind="removed")
            await eventually(lambda: len(index) == 0)
            fake.stores("y")
            await eventually(lambda: len(index) == 1)
            await fake.stop()
            fake.num_forgotten, fake.events = 0, []
            await fake.start()
            await eventually(lambda: len(index) == 0)

    run(main)


def test_the_busier_one_is_left_alone_even_if_it_has_a_few_pages_more():
    async def main():
        async with rig(decode=2) as router:
            for fake in router.decode:
                fake.keys = {"warm": [key_of("x")]}
            router.decode[0].stores("x")
            router.decode[0].load = 5
            await eventually(lambda: len(router.fleet.index) == 1)
            await eventually(lambda: router.fleet.targets[0].num_requests == 5)
            await router.complete("warm")
            assert [len(fake.seen) for fake in router.decode] == [0, 1]

    run(main)


def test_one_request_of_a_hundred_thousand_tokens_is_more_than_three_of_a_hundred():
    """By what servers say of the requests of others, and by what was sent there from here."""

    async def main():
        async with rig(decode=2, admin_key="root") as router:
            heavy, light = router.decode
            heavy.load, heavy.tokens = 1, 100_000
            light.load, light.tokens = 3, 300
            await eventually(lambda: [m.num_requests for m in router.fleet.targets] == [1, 3])
            await router.complete("x")
            assert [len(fake.seen) for fake in router.decode] == [0, 1]
            heavy.load, heavy.tokens, light.load, light.tokens = 0, 0, 0, 0
            await eventually(lambda: [m.num_requests for m in router.fleet.targets] == [0, 0])
            first = router.fleet.targets[0]
            with first.busy(100_000):
                for _ in range(4):
                    await router.complete("x")
            assert [len(fake.seen) for fake in router.decode] == [0, 5]

    run(main)


def test_a_long_prefix_there_outweighs_a_few_requests_but_not_a_longer_prompt_before_it():
    async def main():
        async with rig(decode=2, admin_key="root") as router:
            names = [f"page {number}" for number in range(1000)]  # 16,000 tokens
            for fake in router.decode:
                fake.keys = {"warm": [key_of(name) for name in names]}
            warm, cold = router.decode
            warm.stores(*names)
            await eventually(lambda: len(router.fleet.index) == 1000)
            warm.load, warm.tokens = 3, 300
            await eventually(lambda: router.fleet.targets[0].num_requests == 3)
            await router.complete("warm")
            assert [len(fake.seen) for fake in (warm, cold)] == [1, 0]
            warm.load, warm.tokens = 1, 100_000
            await eventually(lambda: router.fleet.targets[0].load > 100_000)
            await router.complete("warm")
            assert [len(fake.seen) for fake in (warm, cold)] == [1, 1]

    run(main)


def test_servers_that_report_no_tokens_are_compared_by_requests():
    async def main():
        async with rig(decode=2, admin_key="root") as router:
            busy, _ = router.decode
            busy.load, busy.tokens = 2, None
            await eventually(lambda: router.fleet.targets[0].num_requests == 2)
            for _ in range(2):
                await router.complete("x")
            assert [len(fake.seen) for fake in router.decode] == [0, 2]

    run(main)


def test_a_router_that_comes_late_hears_all_and_nobody_waits_for_it():
    """The real log of an engine, by the router's own way of asking."""
    names = [f"page {number}" for number in range(50_000)]

    async def main():
        async with rig(decode=2, admin_key="root") as router:
            fake, other = router.decode
            fake.log = EventLog()
            for name in names:
                key = bytes.fromhex(key_of(name))
                fake.log.take_in(EventBatch([stored(key)], 0), list)
            slices = []
            real = router.fleet.index.stored

            def counted(server, tier, keys):
                slices.append(len(keys))
                real(server, tier, keys)

            router.fleet.index.stored = counted
            await eventually(lambda: len(router.fleet.index) == 50_000)
            assert max(slices) <= 1024
            fake.log.take_in(EventBatch([stored(b"new".ljust(32))], 0), list)
            await eventually(lambda: router.fleet.index.matched([b"new".ljust(32)]) != {})
            assert fake.num_present_asked == 1, "what is present is told once"
            await fake.stop()
            fake.log = EventLog()
            await fake.start()
            await eventually(lambda: len(router.fleet.index) == 0)
            await eventually(lambda: not router.fleet.index.sweep(0))

    run(main)


def stored(key: bytes) -> CacheEvent:
    return CacheEvent(EventKind.STORED, "host", "full", key)
