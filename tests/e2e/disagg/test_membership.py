"""`quire route` without a list: servers come by themselves, answer, and leave."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.disagg.fleet import SUBJECT, is_right, prompt
from e2e.disagg.servers import TIMEOUT_S, Node, Program, complete, running, stream
from e2e.exactness.subjects import PAGE
from e2e.serving.server import wait_until

NUM_TOKENS = 8


@pytest.mark.long
def test_servers_come_to_a_router_that_knows_nobody_and_leave_it(tmp_path: Path) -> None:
    with (
        Program(tmp_path / "router", "route", "--port", "0") as router,
        httpx.Client(base_url=router.url, timeout=TIMEOUT_S) as http,
    ):
        assert not members(http)
        mine = prompt(200)
        assert complete(http, mine, NUM_TOKENS).status == 503
        options: dict[str, Any] = {"router": router.url, "chunk_tokens": PAGE}
        prefill = Node(tmp_path / "prefill", SUBJECT, role="prefill", **options)
        decode = Node(tmp_path / "decode", SUBJECT, role="decode", **options)
        with running(prefill, decode):
            wait_until(lambda: states(http) == {"prefill": "up", "decode": "up"}, "both have come")
            is_right(mine, stream(http, mine, NUM_TOKENS))
            assert prefill.handover()["sent_pages"] > 0  # the router has named it

            prefill.process.send_signal(signal.SIGTERM)
            assert prefill.wait() == 0
            wait_until(lambda: states(http) == {"decode": "up"}, "it has left")
            is_right(other := prompt(200), complete(http, other, NUM_TOKENS))

            decode.kill_all()  # without a word: it is asked, and is not there
            wait_until(lambda: states(http).get("decode") in (None, "down"), "it is missed")
            assert complete(http, mine, NUM_TOKENS).status == 503


def members(http: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/health").json()["members"]
    return found


def states(http: httpx.Client) -> dict[str, str]:
    return {member["side"]: member["state"] for member in members(http)}
