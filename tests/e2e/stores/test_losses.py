"""What a shared store loses, damages and refuses, and changes of store, in real `quire serve`
processes on the embedded model. Every answer is the oracle's, no request fails, what could not be
had is a miss with a reason that is counted, and afterwards the store has all of it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.exactness.subjects import PAGE
from e2e.serving.client import Client, Messages, client_of
from e2e.serving.oracle import Oracle, check_same
from e2e.serving.server import Server
from e2e.stores.places import Fault, Place, break_headers, cut_short, lose
from e2e.stores.test_faults import PATIENCE_S, opened
from e2e.stores.test_policies import (
    NUM_TOKENS,
    SMALL,
    STORES,
    Meanwhile,
    ask_all,
    conversations,
    oracle,
)
from quire.types import PageKey

__all__ = ["oracle"]  # a fixture

ROOMY = {
    "device_memory": "96MiB",
    "host_memory": "96MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": PAGE,
}
SERVES = ("slow", "shaped", "full", "a replica")
"""Faults in which the store may still do all that it is asked."""
LOSES = ("missing", "restarted empty")
REASONS = ("error", "mismatch", "read", "written", "declined")


class Conversation:
    """One chat with a server, whose pages are known."""

    def __init__(self, client: Client, oracle: Oracle, chat: Messages) -> None:
        self.client = client
        self._oracle = oracle
        self._chat = chat
        said = client.http.post("/admin/keys", json={"messages": chat}).raise_for_status().json()
        assert said["page_size"] == PAGE
        self.pages = [PageKey(bytes.fromhex(key)) for key in said["keys"]]

    def ask(self, salt: str | None = None) -> int:
        """From the store alone. Returns how many pages came from there."""
        self.client.flush("host", "device")
        answer = self.client.chat(self._chat, num_tokens=NUM_TOKENS, salt=salt)
        check_same(answer.text, self._oracle.chat(self._chat, NUM_TOKENS))
        return answer.cached.get("store", 0) // PAGE

    def ask_until_all_is_there(self) -> None:
        """The breaker asks again after a while; what is missing is written when it is computed."""
        ends_s = time.monotonic() + PATIENCE_S
        while self.ask() < len(self.pages):
            assert time.monotonic() < ends_s, f"pages are still missing: {self.counters()}"

    def counters(self) -> dict[str, int]:
        counted: dict[str, int] = self.client.http.get("/admin/store").json()["counters"]
        return counted

    def failures(self) -> int:
        """Pages and calls that failed for a reason that is counted."""
        return sum(
            count
            for name, count in self.counters().items()
            if name.partition(":")[0] in REASONS and not name.endswith(":ok")
        )


@pytest.mark.long
@pytest.mark.parametrize("name", STORES)
def test_a_lost_page_gives_the_prefix_before_it_and_is_written_again_c16(
    name: str, store_url, tmp_path: Path, oracle: Oracle
) -> None:
    url, (chat,) = store_url(name), conversations(oracle, 1)
    with Server(tmp_path / "one", store=url, **ROOMY) as server, client_of(server) as client:
        talk = Conversation(client, oracle, chat)
        assert talk.ask() == 0
        assert talk.ask() == len(talk.pages) > 4
        for lost in (0, len(talk.pages) // 2, len(talk.pages) - 1):
            client.wait_idle()
            assert lose(url, talk.pages[lost]) == 1
            assert talk.ask() == lost
            assert talk.ask() == len(talk.pages)


@pytest.mark.long
@pytest.mark.parametrize("kind", STORES)
def test_every_fault_of_a_store_is_a_miss_with_a_reason_c16_c17(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Oracle
) -> None:
    (chat,) = conversations(oracle, 1)
    with (
        contextmanager(opened)(kind, tmp_path, monkeypatch) as place,
        Server(tmp_path / "one", store=place.url, **ROOMY) as server,
        client_of(server) as client,
    ):
        talk = Conversation(client, oracle, chat)
        for fault, (harm, undo, _) in faults_of(place).items():
            talk.ask_until_all_is_there()
            client.wait_idle()
            before = talk.failures()
            harm()
            found = talk.ask()
            # Nobody's pages: computed, and written if they can be.
            talk.ask(salt=fault.replace(" ", "-"))
            client.wait_idle()
            print(f"{kind}, {fault}: {found} of {len(talk.pages)} pages")
            if fault in LOSES:
                assert found == 0
            elif fault not in SERVES:
                assert found < len(talk.pages)
                assert talk.failures() > before, (fault, talk.counters())
            undo()
        talk.ask_until_all_is_there()
        nothing_is_held(client)


def faults_of(place: Place) -> dict[str, Fault]:
    """Those of the server and of the way to it, and those of its pages."""

    def of_pages(harm: Callable[[str], int]) -> Fault:
        def act() -> None:
            assert harm(place.url)

        return Fault(act, lambda: None)

    return {
        "missing": of_pages(lose),
        "short": of_pages(cut_short),
        "wrong header": of_pages(break_headers),
        **place.faults,
    }


@pytest.mark.long
@pytest.mark.parametrize("name", STORES)
def test_clearing_detaching_and_changing_the_store_under_load_fails_no_request_c18(
    name: str, store_url, tmp_path: Path, oracle: Oracle
) -> None:
    url, chats = store_url(name), conversations(oracle, 3)
    with (
        Server(tmp_path / "one", store=url, **SMALL, prefetch_policy="wait_complete") as server,
        client_of(server) as client,
    ):
        http = client.http

        def change(turn: int) -> None:
            changes: list[Callable[[], Any]] = [
                lambda: http.post("/admin/cache/flush", json={"tiers": ["store"]}),
                lambda: http.delete("/admin/store"),
                lambda: http.put("/admin/store", json={"url": "memory://"}),
                lambda: http.put("/admin/store", json={"url": url}),
            ]
            changes[turn % len(changes)]().raise_for_status()

        with Meanwhile(change) as changing:
            while changing.turns < 12:
                ask_all(client, oracle, chats)
        http.put("/admin/store", json={"url": url}).raise_for_status()
        ends_s = time.monotonic() + PATIENCE_S
        found = 0
        while not found:
            assert time.monotonic() < ends_s, "the store is of no use any more"
            client.flush("host", "device")
            found = ask_all(client, oracle, chats)
        nothing_is_held(client)


def nothing_is_held(client: Client) -> None:
    client.flush("host", "device")
    status = client.status(check=True)
    assert not any(tier["used_pages"] for tier in status["tiers"]), "something is still held"
