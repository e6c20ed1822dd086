"""Tokens proposed ahead, by a real server: the same text from every tier and after a restart, and
the client is told how many there were."""

import httpx
import pytest

from e2e.serving.chats import first_turn, next_turn
from e2e.serving.client import Client, client_of
from e2e.serving.oracle import Oracle, check_same
from e2e.serving.server import MODEL, Server
from e2e.serving.stores import url_of

NUM_TOKENS = 20
OPTIONS = {
    "device_memory": "96MiB",
    "host_memory": "96MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": 16,
    "draft_tokens": 3,
}


LONG = [pytest.param(way, marks=pytest.mark.long) for way in ("ngram", "eagle-tree")]


@pytest.mark.parametrize("way", ["eagle", *LONG])
def test_every_tier_and_the_next_start_give_the_same_text(tmp_path, store, oracle, way) -> None:
    chat = first_turn("harbour")
    options = OPTIONS | {"speculate": way, "store": url_of(store)}
    with Server(tmp_path / "first", **options) as server, client_of(server) as client:
        check_told(server, way)
        answer = ask(client, oracle, chat)
        ask(client, oracle, chat)
        client.wait_idle()
        client.flush("device")
        ask(client, oracle, chat)
        client.wait_idle()
    chat = next_turn(chat, answer)
    with Server(tmp_path / "second", **options) as server, client_of(server) as client:
        ask(client, oracle, chat)
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'quire_cached_tokens_total{tier="store"} 0.0' not in metrics


def ask(client: Client, oracle: Oracle, messages) -> str:
    answer = client.chat(messages, num_tokens=NUM_TOKENS)
    check_same(answer.text, oracle.chat(messages, NUM_TOKENS))
    return answer.text


def check_told(server: Server, way: str) -> None:
    """In the usage of an answer, and in the metrics. Of the first one: later ones may have found
    that it does not pay."""
    text = "one two three four five six seven eight nine ten " * 6
    body = {"prompt": text, "max_tokens": 24, "temperature": 0, "model": MODEL}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()["usage"]
    details = usage["completion_tokens_details"]
    proposed = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert proposed > 0, f"{way} proposed nothing"
    assert details["accepted_prediction_tokens"] < usage["completion_tokens"]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'quire_proposed_tokens_total{position="1"}' in metrics
