"""Tenants by their keys, behind a router: real processes. The key goes on to the server, each finds
its own where it is, and nobody becomes another by what it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from e2e.disagg.fleet import SUBJECT, prompt
from e2e.disagg.servers import TIMEOUT_S, Node, Program, question, running
from e2e.exactness.subjects import PAGE, Prompt
from e2e.serving.server import wait_until

TENANTS = {"alice": "sk-alice", "bob": "sk-bob"}


def ask(http: httpx.Client, mine: Prompt, key: str | None, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = question(mine, 2, **more.pop("body", {}))
    return http.post("/v1/completions", json=body, headers=headers | more)


def cached(response: httpx.Response) -> int:
    """Tokens of the prompt that were found."""
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def held(node: Node) -> dict[str, int]:
    """Bytes on the device by tenant."""
    tenants = node.get("/admin/tenants")["tenants"]
    return {each["tenant"]: each["device_bytes"] for each in tenants if not each["cache_salt"]}


def test_tenants_find_their_own_through_a_router_and_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    file.write_text("".join(f"{name} {key}\n" for name, key in TENANTS.items()))
    nodes = [
        Node(tmp_path / f"server-{i}", SUBJECT, tenant_keys=file, tenant_share=50) for i in (1, 2)
    ]
    mine = prompt(6 * PAGE + 1)
    with running(*nodes):
        servers = [part for node in nodes for part in ("--server", node.url)]
        with (
            Program(tmp_path / "router", "route", "--port", "0", *servers) as router,
            httpx.Client(base_url=router.url, timeout=TIMEOUT_S) as http,
        ):
            assert [ask(http, mine, key).status_code for key in (None, "sk-eve")] == [401, 401]
            assert cached(ask(http, mine, "sk-alice")) == 0
            wait_until(lambda: metric(http, "quire_router_index_keys") >= 6, "it has been told")
            # Turns would lead every other one to the server that has nothing.
            assert all(cached(ask(http, mine, "sk-alice")) >= 6 * PAGE for _ in range(4))
            assert sorted(held(node).get("alice", 0) > 0 for node in nodes) == [False, True]

            assert cached(ask(http, mine, "sk-bob", body={"cache_salt": "alice"})) == 0
            forged = {
                "x-quire-client": "Bearer sk-alice",
                "x-quire-route": "1.1.guess",
                "x-quire-tenant": "alice",
            }
            assert cached(ask(http, mine, "sk-bob", **forged)) == 0
            assert ask(http, mine, None, **forged).status_code == 401
            assert sum(held(node).get("bob", 0) for node in nodes) > 0
            assert metric(http, "quire_router_keys_failures_total") == 0
