"""Servers come to a router by themselves, and leave it: with the key, and not without."""

import asyncio

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.web.routes import JOIN, LEAVE, Enrolment, enrolled, router_key
from unit.router.fakes import FakeServer, eventually, rig

KEY = {"authorization": f"Bearer {router_key('root')}"}


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_router_that_knows_nobody_gets_to_know_those_who_come():
    async def main():
        async with rig(prefill=0, decode=0) as router:
            assert (await router.client.get("/health")).status_code == 503
            assert (await router.complete()).status_code == 503
            fakes = [await FakeServer(role).start() for role in ("prefill", "decode", "decode")]
            for fake in fakes:
                body = {"url": fake.url, "role": fake.role}
                for _ in range(2):  # it says so again and again
                    assert (await router.client.post(JOIN, json=body, headers=KEY)).is_success
            assert len(router.fleet.members) == 3
            for _ in range(4):
                assert (await router.complete()).status_code == 200
            assert all(fake.seen for fake in fakes[1:])  # both are used
            assert "x-quire-prefill" in fakes[1].seen[0].headers
            gone = {"url": fakes[1].url}
            assert (await router.client.post(LEAVE, json=gone, headers=KEY)).is_success
            count = len(fakes[1].seen)
            for _ in range(3):
                assert (await router.complete()).status_code == 200
            assert len(fakes[1].seen) == count
            for fake in fakes:
                await fake.stop()

    run(main)


def test_one_that_dies_without_a_word_is_forgotten_and_one_that_was_named_is_not():
    async def main():
        async with rig(decode=1, forget_s=0.1) as router:
            guest = await FakeServer("decode").start()
            body = {"url": guest.url, "role": "decode"}
            assert (await router.client.post(JOIN, json=body, headers=KEY)).is_success
            await router.until(guest.url, "up")
            await guest.stop()
            router.decode[0].kill()
            await eventually(lambda: all(m.url != guest.url for m in router.fleet.members))
            await router.until(router.decode[0].url, "down")
            assert (await router.client.post(LEAVE, json=body, headers=KEY)).is_success
            named = {"url": router.decode[0].url}
            assert (await router.client.post(LEAVE, json=named, headers=KEY)).is_success
            assert len(router.fleet.members) == 2

    run(main)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"url": "http://10.0.0.9:1", "role": "decode"}, {}, 401),
        ({"url": "http://10.0.0.9:1", "role": "decode"}, {"authorization": "Bearer root"}, 401),
        ({"url": "http://10.0.0.9:1/admin", "role": "decode"}, KEY, 400),
        ({"url": "file:///etc/passwd", "role": "decode"}, KEY, 400),
        ({"url": "http://10.0.0.9:1", "role": "king"}, KEY, 400),
        ({"role": "decode"}, KEY, 400),
        ([], KEY, 400),
    ],
)
def test_strangers_and_nonsense_are_refused(body, headers, status):
    async def main():
        async with rig() as router:
            for path in (JOIN, LEAVE):
                answer = await router.client.post(path, json=body, headers=headers)
                # Who leaves need not say what it was.
                is_role = path == LEAVE and isinstance(body, dict) and body.get("role") == "king"
                assert answer.status_code == (200 if is_role else status)
            assert len(router.fleet.members) == 2

    run(main)


def test_a_server_that_listens_everywhere_is_where_it_comes_from():
    async def main():
        async with rig(prefill=0, decode=0) as router:
            fake = await FakeServer("decode").start()
            url = fake.url.replace("127.0.0.1", "0.0.0.0")
            body = {"url": url, "role": "decode"}
            assert (await router.client.post(JOIN, json=body, headers=KEY)).is_success
            assert [member.url for member in router.fleet.members] == [fake.url]
            await fake.stop()

    run(main)


def test_a_server_says_so_until_it_goes_whatever_routers_do():
    async def main():
        told: list[tuple[str, str, str]] = []

        def answer(request: httpx.Request) -> httpx.Response:
            told.append((request.url.host, request.url.path, request.headers["authorization"]))
            if request.url.host == "dead":
                raise httpx.ConnectError("no")
            return httpx.Response(401 if len(told) < 4 else 200, json={})

        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        routers = ["http://one:1", "http://dead:1"]
        me = Enrolment("http://me:1", "decode")
        async with enrolled(routers, me, "root", client=client, every_s=0.01) as leaving:
            await eventually(lambda: len(told) > 8)
            leaving.set()
            await eventually(lambda: {t[:2] for t in told} >= {("one", LEAVE), ("dead", LEAVE)})
        assert {key for *_, key in told} == {KEY["authorization"]}
        async with enrolled([], me, None) as leaving:
            assert not leaving.is_set()

    run(main)


@pytest.mark.parametrize("router", ["nonsense", "http://a/b", "ftp://a"])
def test_what_is_no_router_is_refused(router):
    with pytest.raises(ConfigError, match="http://host:port"):
        ServerConfig(routers=(router,))
