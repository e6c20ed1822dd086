"""/admin: its door, its questions to the engine, and what it must not say."""

import numpy as np
import pytest

from quire.engine.messages import (
    Attach,
    CachedTokens,
    Detach,
    Event,
    Events,
    Flush,
    Flushed,
    GetEvents,
    GetKeys,
    GetOutline,
    GetRequests,
    GetStatus,
    GetTenants,
    Keys,
    Outline,
    Requests,
    RequestStatus,
    StoreStatus,
    Tenants,
    TenantStatus,
    Warm,
    Warmed,
)
from quire.errors import EngineError
from quire.server.config import ServerConfig
from quire.types import TENANT_MARK
from unit.server.scripted import ADMIN_KEY, MAX_CONTEXT, MODEL, Rig, error_of, of_role, status

URL = "redis://user:secret@host/0"
KEY_A, KEY_B = b"a" * 32, b"b" * 32
STATUS = RequestStatus(
    id="r1",
    state="transferring",
    side="decode",
    prompt_tokens=100,
    computed_tokens=0,
    output_tokens=0,
    age_s=0.5,
    cached=CachedTokens(device=16),
    handover={"peer": "tcp://a:1", "received": 3},
)
ASKING = [
    ("GET", "/admin/cache", None),
    ("POST", "/admin/cache/flush", {"tiers": ["host"]}),
    ("POST", "/admin/cache/prefetch", {"prompt": "hi"}),
    ("GET", "/admin/store", None),
    ("PUT", "/admin/store", {"url": URL}),
    ("DELETE", "/admin/store", None),
    ("GET", "/admin/requests", None),
    ("GET", "/admin/tenants", None),
    ("GET", "/admin/events", None),
    ("POST", "/admin/keys", {"prompt": "hi"}),
]
EVERYTHING = [*ASKING, ("GET", "/admin/info", None)]


@pytest.fixture(autouse=True)
def answers(engine):
    store = StoreStatus("attached", URL, {"read_ok": 1})
    engine.answers = {
        GetStatus: status(),
        Flush: Flushed({"host": 3}),
        Attach: store,
        Detach: StoreStatus("detached"),
        Warm: Warmed(2, CachedTokens(host=1, store=1)),
        GetRequests: Requests([STATUS]),
        GetTenants: Tenants([TenantStatus("a", 1, 2, 3, 4)], 50, 100),
        GetEvents: Events(7, [Event("stored", "host", KEY_A + KEY_B)], True),
        GetKeys: Keys(16, 40, KEY_A + KEY_B),
    }


@pytest.mark.parametrize(("method", "path", "body"), EVERYTHING)
@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.1"])
def test_whoever_has_no_key_is_refused_wherever_he_comes_from_c49(engine, method, path, body, peer):
    """On loopback too: a proxy on this machine comes from there, and need not say for whom."""
    keyless = Rig(engine, ServerConfig())
    keyed = Rig(engine, ServerConfig(admin_key="k", api_key="other"))
    response = keyless.request(method, path, json=body, peer=peer)
    assert response.status_code == 403
    assert error_of(response)["code"] == "admin_forbidden"
    for key in ("", "Bearer other", "Bearer x"):
        headers = {"Authorization": key}
        response = keyed.request(method, path, json=body, headers=headers, peer=peer)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
    assert not engine.questions
    response = keyed.request(
        method, path, json=body, headers={"Authorization": "Bearer k"}, peer=peer
    )
    assert response.status_code == 200


@pytest.mark.parametrize(("method", "path", "body"), ASKING)
def test_credentials_are_never_sent_back(rig, engine, method, path, body):
    assert "secret" not in rig.request(method, path, json=body).text
    for question in list(engine.answers):
        engine.answers[question] = EngineError(f"cannot open {URL!r}: no route")
    response = rig.request(method, path, json=body)
    assert response.status_code == 409
    assert "secret" not in response.text
    assert "redis://***@host/0" in error_of(response)["message"]


def test_the_cache_is_shown(rig, engine):
    body = rig.request("GET", "/admin/cache").json()
    assert body["running"] == 1
    assert body["tiers"][0] == {
        "name": "device",
        "page_bytes": 1024,
        "num_pages": 100,
        "used_pages": 40,
        "locked_pages": 10,
        "component": "full",
    }
    assert body["store"]["url"] == "redis://***@host/0"
    assert body["checked"] is False
    assert engine.questions == [GetStatus()]


def test_the_cache_is_checked_when_asked(rig, engine):
    assert rig.request("GET", "/admin/cache?check=true").json()["checked"] is True
    assert engine.questions == [GetStatus(True)]
    engine.answers[GetStatus] = EngineError("page 7 is owned twice")
    response = rig.request("GET", "/admin/cache?check=true")
    assert response.status_code == 500
    assert "page 7" in error_of(response)["message"]
    response = rig.request("GET", "/admin/cache?check=perhaps")
    assert response.status_code == 400
    assert error_of(response)["param"] == "check"


def test_a_flush(rig, engine):
    body = {"tiers": ["device", "host", "device"]}
    assert rig.request("POST", "/admin/cache/flush", json=body).json() == {"pages": {"host": 3}}
    assert engine.questions == [Flush(["device", "host"])]


def test_a_flush_says_which_stores_were_left_alone(rig, engine):
    engine.answers[Flush] = Flushed({}, ["s3://theirs?write=never"])
    answer = rig.request("POST", "/admin/cache/flush", json={"tiers": ["store"]}).json()
    assert answer == {"pages": {}, "left_alone": ["s3://theirs?write=never"]}


@pytest.mark.parametrize("body", [{}, {"tiers": []}, {"tiers": ["disk"]}, {"tiers": "host"}])
def test_a_wrong_flush(rig, engine, body):
    response = rig.request("POST", "/admin/cache/flush", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("tiers")
    assert not engine.questions


def test_a_store_is_attached_and_detached(rig, engine):
    body = rig.request("PUT", "/admin/store", json={"url": URL}).json()
    assert (body["state"], body["url"]) == ("attached", "redis://***@host/0")
    assert (body["counters"], body["stores"]) == ({"read_ok": 1}, [])
    assert rig.request("DELETE", "/admin/store").json()["state"] == "detached"
    assert engine.questions == [Attach(URL), Detach()]


@pytest.mark.parametrize("url", ["", "nonsense", "redis://u:secret@h/?a=1&a=2", 5])
def test_a_wrong_store(rig, engine, url):
    response = rig.request("PUT", "/admin/store", json={"url": url})
    assert response.status_code == 400
    assert error_of(response)["param"] == "url"
    assert "secret" not in response.text
    assert not engine.questions


def test_a_prefetch(rig, engine):
    body = {"prompt": "he", "cache_salt": "s"}
    assert rig.request("POST", "/admin/cache/prefetch", json=body).json() == {
        "prompt_tokens": 2,
        "cached_tokens": 2,
        "cached_tokens_by_tier": {"device": 0, "host": 1, "store": 1, "peer": 0},
        "store_hit_tokens": 1,
    }
    assert engine.questions == [Warm(np.array([256], "<i4").tobytes(), "s")]
    for body in ({"prompt": [256]}, {"messages": [{"role": "user", "content": "x"}]}):
        assert rig.request("POST", "/admin/cache/prefetch", json=body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": [99999]},
        {"prompt": ["a"]},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"messages": []},
        {"prompt": "x", "cache_salt": " "},
    ],
)
def test_a_wrong_prefetch(rig, engine, body):
    response = rig.request("POST", "/admin/cache/prefetch", json=body)
    assert response.status_code == 400
    error_of(response)
    assert not engine.questions


def test_an_engine_that_is_gone(rig, engine):
    engine.failure = "the engine is gone"
    response = rig.request("GET", "/admin/store")
    assert response.status_code == 503
    assert error_of(response)["message"] == engine.failure


def test_what_the_server_is(engine):
    engine = of_role("decode")
    engine.status = status()
    rig = Rig(engine)
    assert rig.request("GET", "/admin/info").json() == {
        "role": "decode",
        "peer": "tcp://127.0.0.1:7000",
        "model": MODEL,
        "fingerprint": engine.info.fingerprint,
        "page_size": 16,
        "max_context": MAX_CONTEXT,
        "tp": 1,
        "instance": rig.service.instance,
        "running": 1,
        "waiting": 2,
        "running_tokens": 700,
        "waiting_tokens": 64,
    }
    assert rig.service.instance != Rig(engine).service.instance


def test_requests_in_flight(rig):
    (found,) = rig.request("GET", "/admin/requests").json()["requests"]
    assert (found["id"], found["state"], found["side"]) == ("r1", "transferring", "decode")
    assert found["cached"]["device"] == 16
    assert found["handover"] == {"peer": "tcp://a:1", "received": 3}


def test_those_who_look_at_a_server_share_what_the_engine_is_asked(rig, engine):
    paths = ["/health", "/metrics", "/admin/requests", "/admin/tree"]
    engine.status = status()
    engine.answers[GetOutline] = Outline([])
    for path in paths * 3:
        assert rig.request("GET", path, headers={"cache-control": "max-age=999"}).is_success
    assert [type(each) for each in engine.questions] == [GetStatus, GetRequests, GetOutline]
    for path in paths * 2:
        assert rig.request("GET", path).is_success
    assert len(engine.questions) == 3 + 2 * len(paths)


def test_events_are_in_hex_and_go_on_from_where_one_was(rig, engine):
    assert rig.request("GET", "/admin/events?since=6").json() == {
        "instance": rig.service.instance,
        "last": 7,
        "complete": True,
        "more": False,
        "cursor": 0,
        "events": [{"kind": "stored", "tier": "host", "keys": [KEY_A.hex(), KEY_B.hex()]}],
    }
    assert engine.questions == [GetEvents(6)]
    response = rig.request("GET", "/admin/events?since=-1")
    assert response.status_code == 400
    assert error_of(response)["param"] == "since"


def test_what_is_present_is_told_from_a_cursor_on(rig, engine):
    engine.answers[GetEvents] = Events(9, [Event("stored", "host", KEY_A)], False, True, 17)
    first = rig.request("GET", "/admin/events?since=6").json()
    assert (first["last"], first["cursor"]) == (9, 17)
    assert (first["complete"], first["more"]) == (False, True)
    rig.request("GET", "/admin/events?since=9&cursor=17")
    assert engine.questions == [GetEvents(6), GetEvents(9, 17)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "he"},
        {"prompt": [256], "max_tokens": 5, "seed": 1},
        {"prompt": ["he", "other"]},
        {"prompt": [[256], [1]]},
    ],
)
def test_the_keys_of_a_prompt(rig, engine, body):
    response = rig.request("POST", "/admin/keys", json={"model": MODEL, "cache_salt": "s"} | body)
    assert response.json() == {
        "page_size": 16,
        "num_tokens": 40,
        "keys": [KEY_A.hex(), KEY_B.hex()],
    }
    assert engine.questions == [GetKeys(np.array([256], "<i4").tobytes(), "s")]


@pytest.mark.parametrize(
    ("client", "salt"),
    [
        ("Bearer sk-alice", f"alice{TENANT_MARK}s"),
        ("Bearer sk-eve", "s"),
        ("nonsense", "s"),
        (None, "s"),
    ],
)
def test_the_keys_are_those_of_the_tenant_for_whom_a_router_asks(engine, client, salt):
    rig = Rig(engine, ServerConfig(admin_key=ADMIN_KEY, tenant_keys={"alice": "sk-alice"}))
    headers = {"x-quire-client": client} if client else {}
    body = {"model": MODEL, "prompt": "he", "cache_salt": "s"}
    assert rig.request("POST", "/admin/keys", json=body, headers=headers).status_code == 200
    assert engine.questions == [GetKeys(np.array([256], "<i4").tobytes(), salt)]


def test_the_keys_of_a_chat_are_those_of_its_prompt(rig, engine):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    assert rig.request("POST", "/admin/keys", json=body).status_code == 200
    rig.chat("hi")
    (question,) = engine.questions
    assert np.frombuffer(question.tokens, "<i4").tolist() == engine.calls[0].tokens


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": "x", "messages": []}])
def test_the_keys_of_nothing(rig, engine, body):
    response = rig.request("POST", "/admin/keys", json=body)
    assert response.status_code == 400
    error_of(response)
    assert not engine.questions
