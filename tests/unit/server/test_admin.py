"""/admin: its door, its questions to the engine, and what it must not say."""

import numpy as np
import pytest

from quire.engine.messages import (
    Attach,
    CachedTokens,
    Detach,
    Flush,
    Flushed,
    GetStatus,
    StoreStatus,
    Warm,
    Warmed,
)
from quire.errors import EngineError
from quire.server.config import ServerConfig
from unit.server.scripted import Rig, error_of, status

URL = "redis://user:secret@host/0"
EVERYTHING = [
    ("GET", "/admin/cache", None),
    ("POST", "/admin/cache/flush", {"tiers": ["host"]}),
    ("POST", "/admin/cache/prefetch", {"prompt": "hi"}),
    ("GET", "/admin/store", None),
    ("PUT", "/admin/store", {"url": URL}),
    ("DELETE", "/admin/store", None),
]


@pytest.fixture(autouse=True)
def answers(engine):
    store = StoreStatus("attached", URL, {"read_ok": 1})
    engine.answers = {
        GetStatus: status(),
        Flush: Flushed({"host": 3}),
        Attach: store,
        Detach: StoreStatus("detached"),
        Warm: Warmed(2, CachedTokens(host=1, store=1)),
    }


@pytest.mark.parametrize(("method", "path", "body"), EVERYTHING)
def test_the_door(engine, method, path, body):
    open_rig, keyed = Rig(engine), Rig(engine, ServerConfig(admin_key="k", api_key="other"))
    assert open_rig.request(method, path, json=body).status_code == 200
    assert open_rig.request(method, path, json=body, peer="::ffff:127.0.0.1").status_code == 200
    for options in (
        {"peer": "10.0.0.1"},
        {"headers": {"X-Forwarded-For": "127.0.0.1"}},
        {"headers": {"Host": "evil.example"}},
        {"headers": {"Origin": "https://evil.example"}},
    ):
        response = open_rig.request(method, path, json=body, **options)
        assert response.status_code == 403
        assert error_of(response)["code"] == "admin_forbidden"
    for key in (None, "Bearer other", "Bearer x"):
        headers = {"Authorization": key} if key else {}
        response = keyed.request(method, path, json=body, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer k", "X-Forwarded-For": "1.2.3.4"}
    response = keyed.request(method, path, json=body, headers=good, peer="10.0.0.1")
    assert response.status_code == 200


@pytest.mark.parametrize(("method", "path", "body"), EVERYTHING)
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


@pytest.mark.parametrize("body", [{}, {"tiers": []}, {"tiers": ["disk"]}, {"tiers": "host"}])
def test_a_wrong_flush(rig, engine, body):
    response = rig.request("POST", "/admin/cache/flush", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("tiers")
    assert not engine.questions


def test_a_store_is_attached_and_detached(rig, engine):
    body = rig.request("PUT", "/admin/store", json={"url": URL}).json()
    assert body == {"state": "attached", "url": "redis://***@host/0", "counters": {"read_ok": 1}}
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
