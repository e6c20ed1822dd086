"""Conditions of the cache over stores that a cluster shares, in real `quire serve` processes on the
embedded model: every policy, a host that is too small, pages evicted while requests run. Every
answer is the oracle's, no request fails, and in the end nothing is held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.serving.chats import PLACES, first_turn, next_turn
from e2e.serving.client import Client, Messages, client_of
from e2e.serving.oracle import Oracle, check_same
from e2e.serving.server import Server
from quire.models import embedded_model

NUM_TOKENS = 6
SMALL = {
    "device_memory": "48MiB",
    "host_memory": "8MiB",  # eleven pages: what the store has does not fit
    "prefetch_threshold": 16,
}
STORES = ["redis", "mooncake", "s3"]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(embedded_model())


def ask_all(client: Client, oracle: Oracle, chats: Sequence[Messages]) -> int:
    """All at once. Returns how many tokens came from the store."""
    with ThreadPoolExecutor(len(chats)) as threads:
        answers = list(threads.map(lambda chat: client.chat(chat, num_tokens=NUM_TOKENS), chats))
    for chat, answer in zip(chats, answers, strict=True):
        check_same(answer.text, oracle.chat(chat, NUM_TOKENS))
    return sum(answer.cached.get("store", 0) for answer in answers)


def conversations(oracle: Oracle, count: int) -> list[Messages]:
    """Second turns: they begin with what the first turns have left behind."""
    chats = [first_turn(place) for place in PLACES[:count]]
    return [next_turn(chat, oracle.chat(chat, NUM_TOKENS).text) for chat in chats]


class Meanwhile:
    """Again and again, beside what is in the `with`; what it raises, it raises at the end."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.turns = 0

    def __enter__(self) -> Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._act(self.turns)
                self.turns += 1
        except Exception as error:  # the boundary of a thread
            self._error = error


@pytest.mark.long
@pytest.mark.parametrize(
    "policies",
    [
        ("write_through", "wait_complete"),
        ("write_through_selective", "timeout"),
        ("write_back", "best_effort"),
    ],
    ids=" and ".join,
)
@pytest.mark.parametrize("name", STORES)
def test_every_policy_with_a_small_host_while_pages_are_evicted_c9_c10_c11_c12_c13_c14_c15(
    name: str, policies: tuple[str, str], store_url, tmp_path: Path, oracle: Oracle
) -> None:
    write, prefetch = policies
    options = SMALL | {"write_policy": write, "prefetch_policy": prefetch}
    chats = conversations(oracle, 4)
    with (
        Server(tmp_path / "one", store=store_url(name), **options) as server,
        client_of(server) as client,
    ):

        def evict(turn: int) -> None:
            tiers = ["device"] if turn % 2 else ["host", "device"]
            client.http.post("/admin/cache/flush", json={"tiers": tiers}).raise_for_status()

        with Meanwhile(evict) as evicting:
            for _ in range(3):
                ask_all(client, oracle, [chat[:1] for chat in chats])
                ask_all(client, oracle, chats)
        assert evicting.turns
        if write == "write_through":
            client.flush("host", "device")
            assert ask_all(client, oracle, chats) > 0
        client.flush("host", "device")
        status = client.status(check=True)
        assert not any(tier["used_pages"] for tier in status["tiers"]), "something is still held"
