"""What a store is opened with is nowhere to be read: a real `quire serve`, its log, its pages and
endpoints, its spans."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest

from collector import collecting, wait_until
from e2e.serving.chats import PLACES, first_turn
from e2e.serving.client import Client, client_of
from e2e.serving.server import Server
from store_servers import Moto, Valkey

SECRET = "open-sesame"
PATHS = (
    "/admin/cache",
    "/admin/info",
    "/admin/requests",
    "/admin/store",
    "/admin/tenants",
    "/admin/tree",
    "/health",
    "/metrics",
    "/openapi.json",
    "/ready",
    "/ui",
)


@pytest.mark.long
def test_credentials_of_a_store_are_nowhere_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not when its server is gone, lets nobody in any more, or never did."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"id-{SECRET}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    redis, bucket = Valkey(tmp_path, requirepass=SECRET), Moto(tmp_path)
    own = f"redis://default:{SECRET}@{redis.address}"
    others = (
        f"redis://default:not-{SECRET}@{redis.address}",
        f"redis://default:{SECRET}@127.0.0.1:1",
        f"s3://me:{SECRET}@pages/cache",
        f"s3://pages/cache?secret_access_key={SECRET}",
        f"az://pages/cache?sv=1&sig={SECRET}",
        f"mooncake://user:{SECRET}@127.0.0.1:1",
        f"nobodys://user:{SECRET}@host",
        bucket.url.replace("http://", f"http://user:{SECRET}@"),
    )
    read: list[str] = []
    with (
        collecting() as collector,
        Server(tmp_path / "serve", store=own, log_requests=True, otlp=collector.url) as server,
        client_of(server) as client,
        closing(httpx.Client(base_url=server.url, headers=server.admin_headers)) as http,
    ):
        try:
            ask(client, 0)
            read += all_of(http)
            for url in (*others, bucket.url, own):
                answer = http.put("/admin/store", json={"url": url}, timeout=120)
                assert answer.is_success == (url in (bucket.url, own)), answer.text
                read += [answer.text, *all_of(http)]
                ask(client, 1)
            redis.stop()
            ask(client, 2)
            read += all_of(http)
        finally:
            redis.stop()
            bucket.stop()
        wait_until(lambda: collector.spans, "spans have come")
        read += [str(span) for span in collector.spans]
        server.press_ctrl_c()
        server.wait()
        read.append(server.log)
    assert not [text for text in read if SECRET in text]


def all_of(http: httpx.Client) -> list[str]:
    answers = [http.get(path, follow_redirects=True, timeout=60) for path in PATHS]
    assert all(answer.is_success for answer in answers), answers
    return [answer.text for answer in answers]


def ask(client: Client, place: int) -> None:
    client.flush("device", "host")
    assert client.chat(first_turn(PLACES[place]), num_tokens=4).text
    client.wait_idle()
