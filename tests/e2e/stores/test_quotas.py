"""Quotas in all three tiers under pressure, by a real server on a directory: who has its share
costs nobody a page; and what is retained is found there until its time is over. More of that, in
virtual time: tests/sim/test_retention.py."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.disagg.fleet import SUBJECT, prompt
from e2e.disagg.servers import MODEL, TIMEOUT_S, Node, question
from e2e.exactness.subjects import PAGE, Prompt
from e2e.serving.server import wait_until
from quire.store.base import HEADER_BYTES

ROOM, PAGES = 64, 4
"""Pages of the store, and of a prompt."""
SHARE = 25
KEYS = {"alice": "sk-alice", "bob": "sk-bob"}


class Place:
    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self._folder = folder
        self._http = httpx.Client(base_url=node.url, timeout=TIMEOUT_S)

    def ask(self, who: str, mine: Prompt, **cache: Any) -> None:
        body = question(mine, 1) | ({"cache": cache} if cache else {})
        headers = {"authorization": f"Bearer {KEYS[who]}"}
        answer = self._http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        self.node.wait_clean()

    def num_stored(self, who: str, mine: Prompt) -> int:
        return len(self.used(who, mine))

    def used(self, who: str, mine: Prompt) -> list[int]:
        """Of the pages of a prompt, those that the directory has: when each was used."""
        answer = self._http.post(
            "/admin/keys",
            json={"model": MODEL, "prompt": mine},
            headers=self.node.admin_headers | {"x-quire-client": f"Bearer {KEYS[who]}"},
        )
        assert answer.status_code == 200, answer.text
        keys = answer.json()["keys"]
        assert len(keys) == PAGES
        found = [path for key in keys for path in self._folder.glob(f"objects/{key[:2]}/{key}.*")]
        return [path.stat().st_mtime_ns for path in found]

    def close(self) -> None:
        self._http.close()


@pytest.mark.long
def test_what_is_retained_is_in_the_store_until_its_time_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with Node(tmp_path / "server", SUBJECT) as node, closing(Place(node, folder)) as place:
        size = node.page_bytes()["full"] + HEADER_BYTES
        url = f"file://{folder}?max={6 * PAGES * size}&reserve=0"
        with node.client() as admin:
            assert admin.put("/admin/store", json={"url": url}).status_code == 200
        kept, other = prompt(PAGES * PAGE + 1), prompt(PAGES * PAGE + 1)
        place.ask("alice", kept, retain_s=3600)
        place.ask("alice", other)
        for _ in range(4):
            for _ in range(2):
                place.ask("alice", prompt(PAGES * PAGE + 1))
            before = place.used("alice", kept)
            assert len(before) == PAGES
            wait_until(lambda b=before: min(place.used("alice", kept)) > max(b), "it is told again")
        assert place.num_stored("alice", other) == 0, "there was pressure"
        node.flush("host", "device")
        reply = node.ask(kept, 1)
        assert reply.cached.get("store") == PAGES * PAGE


def test_who_has_its_share_costs_nobody_a_page_of_any_tier(tmp_path: Path) -> None:
    file, folder = tmp_path / "tenants", tmp_path / "store"
    file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    with Node(tmp_path / "server", SUBJECT, tenant_keys=file, tenant_share=SHARE) as node:
        size = node.page_bytes()["full"] + HEADER_BYTES
        url = f"file://{folder}?max={ROOM * size}&reserve=0"
        with node.client() as admin:
            assert admin.put("/admin/store", json={"url": url}).status_code == 200
        place = Place(node, folder)
        try:
            alices = [prompt(PAGES * PAGE + 1) for _ in range(3)]
            for mine in alices:
                place.ask("alice", mine)
            bobs = [prompt(PAGES * PAGE + 1) for _ in range(40)]
            for mine in bobs:
                place.ask("bob", mine, priority=2)
            assert [place.num_stored("alice", mine) for mine in alices] == [PAGES] * 3
            stored = [place.num_stored("bob", mine) for mine in bobs]
            assert sum(stored) <= ROOM * SHARE // 100
            assert stored[-1] == PAGES, "what it wrote last it has"
            tenants = {each["tenant"]: each for each in node.get("/admin/tenants")["tenants"]}
            written = tenants["bob"]["store_written_bytes"]
            assert written > ROOM * size * SHARE // 100, "there was pressure"
            quota = node.get("/admin/tenants")["quota"]
            assert quota["store_share"] == SHARE / 100
            for tier in ("device", "host"):
                assert tenants["bob"][f"{tier}_bytes"] <= quota[f"{tier}_bytes"]
        finally:
            place.close()
