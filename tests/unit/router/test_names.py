"""Servers that the router finds by DNS, at its start and while it runs."""

import asyncio
from urllib.parse import urlsplit

import pytest

from quire.errors import ConfigError
from quire.router.config import parse_urls
from unit.router.fakes import FakeServer, eventually, rig

NAME = "quire-decode.example"


def run(main) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


class Directory:
    """What DNS would say."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: list[str] | None = list(addresses)
        """None: it does not answer."""
        self.asked: list[tuple[str, int]] = []

    async def look(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if self.addresses is None:
            raise OSError("no such host")
        return self.addresses


def port_of(fake: FakeServer) -> int:
    port = urlsplit(fake.url).port
    assert port is not None
    return port


def test_every_address_of_a_name_is_a_server_that_comes_and_goes_with_it():
    async def main():
        one = await FakeServer("unified").start()
        two = await FakeServer("unified", host="127.0.0.2", port=port_of(one)).start()
        directory = Directory("127.0.0.1")
        name = f"dns://{NAME}:{port_of(one)}"
        async with rig(
            prefill=0, decode=0, names=[name], look=directory.look, names_interval_s=0.02
        ) as router:
            assert directory.asked[0] == (NAME, port_of(one))
            assert [member.url for member in router.fleet.members] == [one.url]
            assert (await router.complete()).status_code == 200

            directory.addresses = ["127.0.0.1", "127.0.0.2"]
            await router.until(two.url, "up")
            for _ in range(4):
                assert (await router.complete()).status_code == 200
            assert two.seen

            directory.addresses = ["127.0.0.2"]  # the first has moved away
            await eventually(lambda: [m.url for m in router.fleet.members] == [two.url])
            count = len(one.seen)
            for _ in range(3):
                assert (await router.complete()).status_code == 200
            assert len(one.seen) == count

            directory.addresses = None
            asked = len(directory.asked)
            await eventually(lambda: len(directory.asked) > asked + 2)
            assert [member.url for member in router.fleet.members] == [two.url]
            assert (await router.complete()).status_code == 200
        await one.stop()
        await two.stop()

    run(main)


def test_a_router_starts_before_its_names_are_known():
    async def main():
        directory = Directory()
        directory.addresses = None
        fake = await FakeServer("unified").start()
        async with rig(
            prefill=0,
            decode=0,
            names=[f"dns://{NAME}:{port_of(fake)}"],
            look=directory.look,
            names_interval_s=0.02,
        ) as router:
            assert (await router.complete()).status_code == 503
            directory.addresses = ["127.0.0.1"]
            await router.until(fake.url, "up")
            assert (await router.complete()).status_code == 200
        await fake.stop()

    run(main)


@pytest.mark.parametrize("text", ["dns://name", "dns://:8000", "dns://name:8000/path"])
def test_a_name_needs_a_port_and_nothing_else(text):
    with pytest.raises(ConfigError, match="dns://name:port"):
        parse_urls([text])
