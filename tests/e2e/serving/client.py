"""What the tests ask a server: chats through OpenAI's own client, and the admin API."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from e2e.serving.server import MODEL, Server, is_moving, wait_until

TIMEOUT_S = 300.0

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    text: str
    finish: str
    prompt_tokens: int
    cached: dict[str, int]
    """Prompt tokens that were not computed, by tier."""


class Client:
    def __init__(self, api: openai.OpenAI, http: httpx.Client, model: str) -> None:
        self.api = api
        self.http = http
        self.model = model

    def chat(self, messages: Messages, *, num_tokens: int, salt: str | None = None) -> Answer:
        """Greedy."""
        extra = {} if salt is None else {"cache_salt": salt}
        answer = self.api.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=num_tokens,
            temperature=0,
            extra_body=extra,
        )
        (choice,) = answer.choices
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        by_tier = details.model_extra["cached_tokens_by_tier"]
        assert details.cached_tokens == sum(by_tier.values())
        return Answer(
            choice.message.content, choice.finish_reason, answer.usage.prompt_tokens, by_tier
        )

    def stream(self, messages: Messages, *, num_tokens: int) -> openai.Stream[Any]:
        """An answer that does not end before `num_tokens`."""
        return self.api.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=num_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    def status(self, *, check: bool = False) -> dict[str, Any]:
        response = self.http.get("/admin/cache", params={"check": check})
        assert response.status_code == 200, response.text
        return response.json()

    def flush(self, *tiers: str) -> None:
        """Waits first until nothing is in flight: what is being copied cannot be evicted."""
        self.wait_idle()
        response = self.http.post("/admin/cache/flush", json={"tiers": tiers})
        assert response.status_code == 200, response.text

    def wait_idle(self) -> None:
        wait_until(lambda: not is_moving(self.status()), "no page is being moved")

    def used_pages(self) -> dict[str, int]:
        return {tier["name"]: tier["used_pages"] for tier in self.status()["tiers"]}


@contextmanager
def client_of(server: Server, model: str = MODEL) -> Iterator[Client]:
    with (
        openai.OpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as api,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S, headers=server.admin_headers) as http,
    ):
        yield Client(api, http, model)


class Reader(threading.Thread):
    """Reads a long stream to its end, whatever that is."""

    def __init__(self, client: Client, messages: Messages, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._messages = messages
        self._num_tokens = num_tokens
        self.num_chunks = 0
        self.error: openai.OpenAIError | None = None
        """None: it is complete."""
        self.start()

    def run(self) -> None:
        try:
            for _ in self._client.stream(self._messages, num_tokens=self._num_tokens):
                self.num_chunks += 1
        except openai.OpenAIError as error:
            self.error = error


@contextmanager
def reading(
    client: Client, chats: Iterable[Messages], num_tokens: int = 700
) -> Iterator[list[Reader]]:
    """So many streams at once, each of which has begun."""
    readers = [Reader(client, messages, num_tokens) for messages in chats]
    wait_until(lambda: all(r.num_chunks > 2 or r.error for r in readers), "all streams have begun")
    failed = [reader.error for reader in readers if reader.error]
    assert not failed, failed
    yield readers
    for reader in readers:
        reader.join(TIMEOUT_S)
        assert not reader.is_alive(), "a stream neither ends nor fails"
