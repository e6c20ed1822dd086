"""kill -9 in mid-load: what is left behind, and how a conversation goes on afterwards."""

import time

import httpx
import openai
import pytest

from e2e.serving.chats import PLACES, first_turn, next_turn
from e2e.serving.client import client_of, reading
from e2e.serving.oracle import check_same
from e2e.serving.server import Server, wait_until
from e2e.serving.stores import keys_in, strangers, unfinished, url_of, verify

NUM_TOKENS = 8
OPTIONS = {
    "device_memory": "96MiB",
    "host_memory": "96MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": 16,
}


def test_kill_9_in_mid_load_then_the_conversations_go_on(tmp_path, store, oracle):
    chats = kill_in_mid_load(tmp_path / "first", store)
    with (
        Server(tmp_path / "second", store=url_of(store), **OPTIONS) as server,
        client_of(server) as client,
    ):
        go_on(client, oracle, chats)
        # Again, and this time nobody can tidy up: all its processes are killed at once.
        with reading(client, map(first_turn, PLACES[5:])) as streams:
            wait_for_a_write(store)
            server.kill_all()
        assert all(isinstance(s.error, openai.APIConnectionError) for s in streams)
        server.wait_gone()
    check_store(store)


@pytest.mark.long
def test_two_ranks_killed_in_mid_load_then_one_of_the_next_two(tmp_path, store, oracle):
    chats = kill_in_mid_load(tmp_path / "first", store, tp=2)
    with (
        Server(tmp_path / "second", store=url_of(store), tp=2, **OPTIONS) as server,
        client_of(server) as client,
    ):
        go_on(client, oracle, chats)
        with reading(client, map(first_turn, PLACES[5:])) as streams:
            server.ranks[1].kill()
        check_told(streams)
        assert server.wait() == 1
        server.wait_gone()
        assert "the engine process ended with code" in server.log
        assert server.leftovers() == []
    check_store(store)


def test_an_engine_that_is_killed_takes_its_ranks_and_the_server_along(tmp_path, store):
    with (
        Server(tmp_path / "only", store=url_of(store), tp=2, **OPTIONS) as server,
        client_of(server) as client,
    ):
        with reading(client, map(first_turn, PLACES[:3])) as streams:
            server.engine.kill()
        check_told(streams)
        assert server.wait() == 1
        server.wait_gone()
        assert "the engine process was killed by signal 9" in server.log
        assert server.leftovers() == []
    check_store(store)


@pytest.mark.long
def test_a_rank_that_is_killed_while_nothing_happens(tmp_path):
    with (
        Server(tmp_path, tp=2, device_memory="48MiB", host_memory="48MiB") as server,
        client_of(server) as client,
    ):
        client.wait_idle()
        server.ranks[1].kill()
        wait_until(lambda: server.ended, "the server has noticed")
        assert server.wait() == 1
        server.wait_gone()
        assert "worker 1: killed by signal 9" in server.log
        assert server.leftovers() == []


def test_an_engine_that_hangs_is_not_healthy(tmp_path):
    options = {"device_memory": "48MiB", "host_memory": "48MiB", "engine_silence": 3}
    with Server(tmp_path, **options) as server:

        def health() -> httpx.Response:
            return httpx.get(f"{server.url}/health", timeout=60)

        assert health().status_code == 200
        server.engine.suspend()
        try:
            wait_until(lambda: health().status_code == 503, "it is seen to hang")
            assert "said nothing for" in health().text
        finally:
            server.engine.resume()
        wait_until(lambda: health().status_code == 200, "it is well again")


def kill_in_mid_load(folder, store, **options):
    """Kills only the server itself. Returns conversations of one turn that it has answered."""
    with (
        Server(folder, store=url_of(store), **OPTIONS, **options) as server,
        client_of(server) as client,
    ):
        chats = []
        for place in PLACES[:2]:
            chat = first_turn(place)
            answer = client.chat(chat, num_tokens=NUM_TOKENS)
            chats.append(next_turn(chat, answer.text))
        client.wait_idle()  # these are in the store, whatever is not
        with reading(client, [*chats, *map(first_turn, PLACES[2:5])]) as streams:
            wait_for_a_write(store)
            server.process.kill()
        assert all(isinstance(s.error, openai.APIConnectionError) for s in streams)
        server.wait_gone()
        assert server.leftovers() == []
    check_store(store)
    return chats


def go_on(client, oracle, chats):
    for chat in chats:
        answer = client.chat(chat, num_tokens=NUM_TOKENS)
        expected = oracle.chat(chat, NUM_TOKENS)
        assert answer.prompt_tokens == expected.prompt_tokens
        assert answer.cached["store"] >= 64
        check_same(answer.text, expected)
    client.wait_idle()
    client.status(check=True)


def check_told(streams):
    """Every client hears that the engine is gone."""
    for stream in streams:
        assert isinstance(stream.error, openai.APIError)
        assert "the engine process" in stream.error.message


def check_store(store):
    """Right after the end of a server: what was being written is gone once somebody looks."""
    report = verify(store)
    assert report["clean"]
    assert report["num_ok"] == len(list(store.glob("objects/??/*"))) > 0
    assert strangers(store) == []
    assert not list((store / "quarantine").iterdir())


def wait_for_a_write(store):
    """Best when a page is just being written; that cannot be had every time."""
    deadline = time.monotonic() + 5.0
    seen = len(keys_in(store))
    while time.monotonic() < deadline:
        if unfinished(store):
            print("killed while a page was being written")
            return
    print(f"killed after {len(keys_in(store)) - seen} pages were written")
