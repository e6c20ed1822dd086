"""`rediss://`: pages through TLS to a real Valkey, behind a door of ours, since not every build of
it has TLS; and servers that are not who they say they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from certificates import certificate
from quire.bench import anystore
from quire.errors import StoreError
from quire.store.url import open_store
from quire.types import PageStatus
from store_servers import Valkey

DOOR = """
import asyncio, ssl, sys
to_port, identity = sys.argv[1:]
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(identity)

async def carry(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()

async def pass_on(near, answer):
    far, ask = await asyncio.open_connection("127.0.0.1", int(to_port))
    await asyncio.gather(carry(near, ask), carry(far, answer))

async def main():
    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""TLS on the port that it prints; what comes through goes on as it is."""


@pytest.fixture
def tls(valkey: Valkey, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """By the name that its certificate says: the URL of the server as `localhost`."""
    valkey.say(b"FLUSHALL")
    doors: list[subprocess.Popen[bytes]] = []

    def open_door(name: str) -> str:
        identity = certificate(tmp_path, name)
        words = [sys.executable, "-c", DOOR, str(valkey.port), str(identity)]
        doors.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        assert doors[-1].stdout is not None
        return f"rediss://localhost:{int(doors[-1].stdout.readline())}?ca={identity}"

    yield open_door
    for each in doors:
        each.kill()
        each.communicate()


def test_pages_come_back_through_tls_for_whoever_asks(tls, valkey, client, pages):
    numbers = range(1, 65)
    url = tls("localhost")
    cache = client(open_store(url))
    assert pages.put_path(cache, *numbers) == [PageStatus.OK] * len(numbers)
    assert pages.get(cache, *numbers) == [PageStatus.OK] * len(numbers)
    assert pages.usable(client(open_store(valkey.url)), *numbers) == len(numbers)


def test_a_server_is_measured_through_tls_beside_its_client(tls):
    found = anystore.run(tls("localhost"), page_bytes=8192, total_bytes=128 << 10, rounds=2)
    assert "redis-py" in found["client"]
    assert found["read"]["ratio"] > 0


def test_a_server_whose_certificate_is_nobodys_or_anothers_is_refused(tls):
    unknown = tls("localhost").partition("?")[0]
    for wrong in (unknown, tls("elsewhere")):
        with pytest.raises(StoreError, match="certificate verify failed") as caught:
            open_store(wrong)
        assert "\n" not in str(caught.value)


def test_who_has_tls_for_a_server_without_or_none_for_one_with_is_told(tls, valkey, monkeypatch):
    monkeypatch.setattr("quire.store.redis.store.OPEN_TIMEOUT_S", 0.5)  # it waits for the rest
    with pytest.raises(StoreError, match="without TLS, write redis://"):
        open_store(f"rediss://{valkey.address}")
    plain = tls("localhost").replace("rediss://", "redis://").partition("?")[0]
    with pytest.raises(StoreError, match="speaks TLS, write rediss://"):
        open_store(plain)
