"""A real server on real weights with sliding windows: hits in every tier, and after a restart."""

import httpx
import pytest

from e2e.serving.client import client_of
from e2e.serving.server import Server
from e2e.serving.stores import url_of, verify
from gemma import gemma_model

NUM_TOKENS = 6
OPTIONS = {
    "device_memory": "96MiB",
    "host_memory": "192MiB",
    "prefetch_policy": "wait_complete",
    "prefetch_threshold": 16,
    "threads": 2,
}
TEXT = " ".join(f"The {n}th house in the street has {n * 7 % 12} windows." for n in range(1, 61))
"""More than the window of 512 tokens."""


@pytest.mark.long
def test_gemma_from_every_tier_and_after_a_restart_c32(tmp_path, store):
    model = str(gemma_model())
    settings = OPTIONS | {"model": model, "store": url_of(store)}
    with Server(tmp_path / "first", **settings) as server, client_of(server) as client:
        text, total, cached = ask(client)
        assert sum(cached.values()) == 0
        reusable = (total - 1) // 16 * 16
        assert ask(client) == (text, total, {"device": reusable})
        client.flush("device")
        assert ask(client) == (text, total, {"host": reusable})
        client.flush("device", "host")
        assert ask(client) == (text, total, {"store": reusable})
        shown = {(t["component"], t["name"]): t for t in client.status(check=True)["tiers"]}
        assert shown["window", "device"]["used_pages"] < shown["full", "device"]["used_pages"]
        metrics = client.http.get("/metrics").text
        assert 'quire_tier_used_pages{component="window",tier="device"}' in metrics
        assert "quire_reuse_enabled 1.0" in metrics
        server.kill_all()
    assert verify(store)["clean"]
    with Server(tmp_path / "second", **settings) as server, client_of(server) as client:
        assert ask(client) == (text, total, {"store": reusable})


def ask(client) -> tuple[str, int, dict[str, int]]:
    """Greedy; the text, the prompt's length, and what was reused by tier."""
    client.wait_idle()
    response: httpx.Response = client.http.post(
        "/v1/completions",
        json={
            "model": client.http.get("/v1/models").json()["data"][0]["id"],
            "prompt": TEXT,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
        },
    )
    assert response.status_code == 200, response.text
    body = response.json()
    tiers = body["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    reused = {tier: count for tier, count in tiers.items() if count}
    return body["choices"][0]["text"], body["usage"]["prompt_tokens"], reused
