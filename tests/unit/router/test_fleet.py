"""Health: who is used, who is not and why, and who is used again."""

import asyncio
import time

import pytest

from quire.router.choose import REQUEST_TOKENS
from quire.router.fleet import Health, Member, MemberSide
from quire.web.keyfile import kept, place_of
from quire.web.routes import read_note
from unit.router.fakes import FakeServer, eventually, rig


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


async def reason(router, fake) -> str:
    table = (await router.client.get("/health")).json()["members"]
    return next(member["reason"] for member in table if member["url"] == fake.url)


def test_health_is_a_table_and_good_while_somebody_can_answer():
    async def main():
        async with rig() as router:
            prefill, decode = router.prefill[0], router.decode[0]
            decode.load = 3
            await eventually(lambda: router.fleet.targets[0].num_requests == 3)
            response = await router.client.get("/health")
            assert response.status_code == 200
            assert response.json() == {
                "status": "ok",
                "members": [
                    {
                        "url": fake.url,
                        "side": fake.role,
                        "state": "up",
                        "reason": "",
                        "model": "tiny",
                        "running": fake.load,
                        "waiting": 0,
                        "in_flight": 0,
                    }
                    for fake in (prefill, decode)
                ],
            }
            prefill.kill()
            await router.until(prefill.url, "down")
            assert (await router.client.get("/ready")).status_code == 200  # decode computes
            # The check that its end cut short says something else.
            while await reason(router, prefill) != "cannot be connected to":
                await asyncio.sleep(0.005)
            assert await router.metric("quire_router_member_up", url=prefill.url) == 0
            assert await router.metric("quire_router_member_up", url=decode.url) == 1
            decode.kill()
            await router.until(decode.url, "down")
            response = await router.client.get("/ready")
            assert response.status_code == 503
            assert response.json()["status"] == "unavailable"

    run(main)


def test_a_server_that_comes_back_is_used_again_with_its_new_page_server():
    async def main():
        async with rig() as router:
            prefill, decode = router.prefill[0], router.decode[0]
            for fake in (prefill, decode):
                await fake.stop()
                await router.until(fake.url, "down")
            prefill.peer = "tcp://127.0.0.1:9999"
            for fake in (prefill, decode):
                await fake.start()
                await router.until(fake.url, "up")
            assert (await router.complete()).status_code == 200
            assert decode.seen[-1].headers["x-quire-prefill"] == "tcp://127.0.0.1:9999"

    run(main)


def test_a_server_that_restarts_between_two_checks_is_asked_anew():
    async def main():
        async with rig() as router:
            (prefill,) = router.prefill
            await prefill.stop()
            prefill.peer = "tcp://127.0.0.1:9999"
            await prefill.start()
            await eventually(lambda: router.fleet.prefill[0].peer == prefill.peer)

    run(main)


def test_a_router_starts_before_its_servers():
    async def main():
        fakes = [FakeServer("prefill"), FakeServer("decode")]
        for fake in fakes:  # so that there are addresses to be known by
            await fake.start()
            await fake.stop()
        async with rig([], [], absent=fakes) as router:
            assert {member.state for member in router.fleet.members} == {"down"}
            assert (await router.complete()).status_code == 503
            for fake in fakes:
                await fake.start()
                await router.until(fake.url, "up")
            assert (await router.complete()).status_code == 200
            for fake in fakes:
                await fake.stop()

    run(main)


def test_an_engine_that_is_gone_is_a_server_that_is_down():
    async def main():
        async with rig() as router:
            router.decode[0].health_refusal = 503
            await router.until(router.decode[0].url, "down")
            assert "503" in await reason(router, router.decode[0])
            router.decode[0].health_refusal = None
            await router.until(router.decode[0].url, "up")

    run(main)


@pytest.mark.parametrize(
    ("role", "peer", "wanted"),
    [
        ("unified", "tcp://127.0.0.1:7000", "start it with --role prefill"),
        ("prefill", "", "start it with --peer-port"),
    ],
)
def test_a_server_that_is_not_what_it_should_be_is_not_used(role, peer, wanted):
    async def main():
        fake = FakeServer(role)
        fake.peer = peer
        async with rig([fake], 1) as router:
            await router.until(fake.url, "unfit")
            assert wanted in await reason(router, fake)
            await router.complete()
            assert "x-quire-prefill" not in router.decode[0].seen[-1].headers
            fake.role, fake.peer = "prefill", "tcp://127.0.0.1:7000"
            await router.until(fake.url, "up")
            assert (await router.complete()).status_code == 200

    run(main)


def test_servers_that_do_not_let_the_router_in_say_so():
    async def main():
        decode = FakeServer("decode")
        decode.admin_refusal = 403
        async with rig(1, [decode], admin_key="another") as router:
            await router.until(decode.url, "unfit")
            assert "give both the same admin_key" in await reason(router, decode)
        async with rig(1, [decode], admin_key="root") as router:
            await router.until(decode.url, "up")

    run(main)


def test_the_key_that_a_server_on_this_machine_made_is_found_after_each_start(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))

    async def main():
        decode = FakeServer("decode")
        decode.admin_refusal = 401
        async with rig(1, [decode], admin_key=None) as router:
            await router.until(decode.url, "unfit")
            for key in ("first", "second"):
                decode.admin_key = key
                with kept(key, place_of(decode.url)):
                    await router.until(decode.url, "up")
                    await router.complete()
                    assert read_note(decode.seen[-1].headers, key, time.time()) is not None
                await decode.stop()
                await router.until(decode.url, "down")
                await decode.start()

    run(main)


def test_a_unified_server_is_used_without_being_let_in():
    async def main():
        servers = [FakeServer("unified"), FakeServer("unified")]
        for fake in servers:
            fake.admin_refusal = 403
        async with rig(0, 0, unified=servers) as router:
            assert (await router.complete()).status_code == 200
            assert not any(fake.num_keys_asked for fake in servers)

    run(main)


def test_a_prefill_server_of_another_model_is_not_used():
    async def main():
        other, same = FakeServer("prefill"), FakeServer("prefill")
        other.fingerprint = "other"
        async with rig([other, same], 1) as router:
            await router.complete()
            assert router.decode[0].seen[0].headers["x-quire-prefill"] == same.peer
            same.kill()
            await router.until(same.url, "down")
            assert (await router.complete()).status_code == 200
            assert "x-quire-prefill" not in router.decode[0].seen[-1].headers

    run(main)


def test_a_page_server_on_all_addresses_is_found_where_its_server_is():
    async def main():
        fake = FakeServer("prefill")
        fake.peer = "tcp://0.0.0.0:7000"
        async with rig([fake], 1) as router:
            assert router.fleet.prefill[0].peer == "tcp://127.0.0.1:7000"

    run(main)


def test_a_request_of_our_own_counts_once_and_only_while_it_lasts():
    member = Member("http://a", MemberSide.DECODE)
    with member.busy():
        member.report(Health("ok", running=3))
        assert member.num_requests == 3
    assert member.num_requests == 2  # not ours
    member.report(Health("ok"))
    with member.busy():
        assert member.num_requests == 1


def test_a_prompt_counts_in_tokens_until_it_is_computed_and_a_part_of_it_afterwards():
    member = Member("http://a", MemberSide.DECODE)
    with member.busy(16_000) as told:
        assert member.load == REQUEST_TOKENS + 16_000
        told()
        told()
        assert member.load == REQUEST_TOKENS + 1000
        with member.busy(500):
            assert member.load == 2 * REQUEST_TOKENS + 1500
    assert member.load == 0
    member.report(Health("ok", running=1, waiting=1, running_tokens=1600, waiting_tokens=100_000))
    assert member.load == 2 * REQUEST_TOKENS + 100_100
    with member.busy(100):
        member.report(Health("ok", waiting=1, waiting_tokens=30_000))
        assert member.load == REQUEST_TOKENS + 100, "it is ours, and most of it is cached there"


def test_a_server_that_will_stop_finishes_what_it_has_and_gets_no_more():
    async def main():
        async with rig(1, 2) as router:
            leaving, staying = router.decode
            leaving.is_draining = True
            await router.until(leaving.url, "draining")
            for _ in range(4):
                assert (await router.complete()).status_code == 200
            assert not leaving.seen
            assert len(staying.seen) == 4
            assert "it is to stop" in await reason(router, leaving)
            leaving.is_draining = False  # its successor
            await router.until(leaving.url, "up")

    run(main)


def test_a_prefill_server_that_will_stop_is_not_named():
    async def main():
        async with rig(2, 1) as router:
            leaving, staying = router.prefill
            leaving.is_draining = True
            await router.until(leaving.url, "draining")
            await router.complete()
            assert router.decode[0].seen[-1].headers["x-quire-prefill"] == staying.peer

    run(main)
