"""Bodies by the schema and beside it: every answer is JSON, and never an unexpected failure.

The property is the same in e2e/server, there against the real server and with fewer examples.
"""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings

from quire.engine.messages import (
    Attach,
    CachedTokens,
    Flush,
    Flushed,
    GetKeys,
    GetOutline,
    GetStatus,
    Keys,
    Outline,
    StoreStatus,
    Warm,
    Warmed,
)
from unit.server.bodies import bodies, posted
from unit.server.scripted import MODEL, Rig, ScriptedEngine, error_of, status

METHODS = {"/admin/store": "PUT"}
SCHEMAS = posted(Rig().app.openapi())
GENERATING = {"model": MODEL, "max_tokens": 3}
FIXED = {
    "/v1/chat/completions": GENERATING,
    "/v1/completions": GENERATING,
    "/v1/responses": {"model": MODEL, "max_output_tokens": 3},
    "/admin/store": {"url": "memory://"},
}


def answering() -> ScriptedEngine:
    engine = ScriptedEngine("héllo")
    engine.answers = {
        GetStatus: status(),
        Flush: Flushed({}),
        Attach: StoreStatus("attached", "memory://"),
        Warm: Warmed(1, CachedTokens()),
        GetKeys: Keys(16, 1, b""),
        GetOutline: Outline([]),
    }
    return engine


def check(path: str, response) -> None:
    content_type = response.headers["content-type"]
    if response.status_code == 200 and content_type.startswith("text/event-stream"):
        for event in response.text.split("\n\n")[:-2]:
            json.loads(event.partition("data: ")[2])
    elif response.status_code == 200:
        assert content_type == "application/json"
        response.json()
    else:
        assert 400 <= response.status_code < 500
        error_of(response)


def test_there_is_a_schema_for_every_body():
    assert SCHEMAS.keys() == {
        "/v1/chat/completions",
        "/v1/completions",
        "/admin/cache/flush",
        "/admin/cache/prefetch",
        "/admin/keys",
        "/admin/store",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    }


@pytest.mark.parametrize("path", SCHEMAS)
def test_any_body_gets_an_answer(path):
    engine = answering()
    rig = Rig(engine)
    is_generating = path.startswith("/v1")
    statuses = set()

    async def post(body: bytes):
        async with rig.client() as client:
            headers = {"content-type": "application/json"}
            method = METHODS.get(path, "POST")
            return await client.request(method, path, content=body, headers=headers)

    with asyncio.Runner() as runner:

        @settings(
            max_examples=200 if is_generating else 150,
            deadline=None,
            derandomize=True,  # by chance, once in many runs, no body was good
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(bodies(SCHEMAS[path], FIXED.get(path, {})))
        def answered(body):
            response = runner.run(post(body))
            statuses.add(response.status_code)
            check(path, response)

        answered()
    assert statuses >= {200, 400}, "both good and bad bodies should have been made"
    assert engine.num_requests == 0
    assert "quire_unexpected_errors_total 0.0" in rig.request("GET", "/metrics").text
    assert rig.chat().status_code == 200
