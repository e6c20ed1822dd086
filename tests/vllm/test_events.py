"""`quire serve --kv-events`, heard by vLLM's own classes in vLLM's own environment: what they
decode and replay is exactly what each tier holds."""

from __future__ import annotations

from pathlib import Path

from e2e.disagg.servers import Node
from e2e.exactness.subjects import PAGE, TINY_LLAMA, Prompt
from ports import free_port
from vllm_subscribers import Subscriber, subscribed

MEDIA = {"device": "GPU", "host": "CPU"}
NUM_TOKENS = 4


def test_vllms_subscriber_rebuilds_what_each_tier_holds(tmp_path: Path) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    server = Node(
        tmp_path, TINY_LLAMA, device_memory="1MiB", host_memory="2MiB",
        kv_events=events, kv_events_replay=replay,
    )  # fmt: skip
    with server:
        # More than either tier can hold, so that pages come, go down and go; some share a prefix.
        for start in range(12):
            ask(server, TINY_LLAMA.cut(37 * (start % 9), 300 + 16 * start))
        with subscribed(events, replay) as subscriber:  # late: all of it is replayed
            assert subscriber.held()["replayed"] > 0
            same_as_in(server, subscriber)
            for start in range(12, 18):
                ask(server, TINY_LLAMA.cut(41 * start, 500))
            same_as_in(server, subscriber)
            server.flush("device")
            assert "GPU" not in subscriber.held()["held"]
            same_as_in(server, subscriber)
            server.flush("host")
            assert not subscriber.held()["held"]


def ask(server: Node, prompt: Prompt) -> None:
    assert server.ask(prompt, NUM_TOKENS).status == 200


def same_as_in(server: Node, subscriber: Subscriber) -> None:
    """By number as the pools count them, by name as the server's own events have them."""
    server.wait_clean()
    found = subscriber.held()
    own: dict[str, set[str]] = {name: set() for name in MEDIA}
    answer = server.get("/admin/events?since=0")
    assert answer["complete"]
    assert not answer.get("more")
    for event in answer["events"]:
        if event["tier"] in own:
            change = own[event["tier"]].update if event["kind"] == "stored" else None
            (change or own[event["tier"]].difference_update)(event["keys"])
    used = {tier["name"]: tier["used_pages"] for tier in server.get("/admin/cache")["tiers"]}
    for tier, medium in MEDIA.items():
        held = set(found["held"].get(medium, ()))
        assert held == own[tier]
        assert len(held) == used[tier]
        for name in held:  # and from the first token on it is known what each block means
            assert len(found["tokens"][name]) % PAGE == 0
