"""Real `quire serve` processes on the embedded model that share a store on a real server: what one
has computed the other finds, also after a kill -9 of both; and prefill and decode apart."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from e2e.disagg.test_servers import Conversation, servers
from e2e.exactness.subjects import PAGE, SMOLLM2
from e2e.serving.chats import PLACES, first_turn, next_turn
from e2e.serving.client import client_of
from e2e.serving.oracle import Oracle, check_same
from e2e.serving.server import Server
from quire.models import embedded_model

NUM_TOKENS = 8
OPTIONS = {
    "device_memory": "96MiB",
    "host_memory": "96MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": 16,
}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(embedded_model())


@pytest.mark.long
@pytest.mark.parametrize("name", ["redis", "mooncake", "s3", "mooncake before s3"])
def test_servers_share_a_store_and_find_it_again_after_a_kill_c32(
    name: str, store_url, tmp_path: Path, oracle: Oracle
) -> None:
    url = store_url(name)
    with (
        Server(tmp_path / "one", store=url, **OPTIONS) as one,
        client_of(one) as first,
        Server(tmp_path / "two", store=url, **OPTIONS) as two,
        client_of(two) as second,
    ):
        chats = []
        for place in PLACES[:2]:
            chat = first_turn(place)
            answer = first.chat(chat, num_tokens=NUM_TOKENS)
            check_same(answer.text, oracle.chat(chat, NUM_TOKENS))
            chats.append(next_turn(chat, answer.text))
        first.wait_idle()
        go_on(second, oracle, chats)
        one.kill_all()
        two.kill_all()
        one.wait_gone()
        two.wait_gone()
    with Server(tmp_path / "again", store=url, **OPTIONS) as again, client_of(again) as client:
        go_on(client, oracle, chats)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mooncake", "redis", "s3"])
def test_decode_restores_from_a_shared_store_what_prefill_need_not_send_c25_c32(
    name: str, store_url
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="quire-") as folder,  # short: sockets are made in it
        servers(SMOLLM2, Path(folder), {"decode": {}}, store_url(name)) as (prefill, decodes),
    ):
        talk = Conversation(SMOLLM2, prefill, decodes["decode"])
        reply, sent = talk.ask()
        assert (reply.total, sent) == (0, talk.num_pages)
        known = talk.go_on()
        for node in (prefill, talk.decode):
            node.flush("host", "device")
        reply, sent = talk.ask()
        assert reply.cached == {"store": known * PAGE}
        assert sent == talk.num_pages - known
        for node in (prefill, talk.decode):
            node.wait_clean()
            assert node.handover()["repairs"] == {}


def go_on(client, oracle, chats) -> None:
    for chat in chats:
        answer = client.chat(chat, num_tokens=NUM_TOKENS)
        expected = oracle.chat(chat, NUM_TOKENS)
        assert answer.prompt_tokens == expected.prompt_tokens
        assert answer.cached["store"] >= 64
        check_same(answer.text, expected)
    client.wait_idle()
    client.status(check=True)
