"""What a request says of its pages, and how many requests a tenant may have in flight."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from quire.engine.messages import CacheWish, GetTenants, Tenants, TenantStatus, TierStatus
from quire.errors import ConfigError
from quire.server.config import ServerConfig
from quire.types import TENANT_MARK, tenant_of
from quire.web.security import read_tenants
from unit.server.scripted import ADMIN_KEY, MODEL, Rig, ScriptedEngine, error_of


def asked(rig: Rig, **fields) -> CacheWish | None:
    response = rig.chat(**fields)
    assert response.status_code == 200, response.text
    return rig.engine.calls[-1].cache


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        ({}, None),
        ({"cache": None}, None),
        ({"prompt_cache_key": "a", "prompt_cache_retention": "24h"}, CacheWish(86400.0, 1)),
        ({"prompt_cache_retention": "in_memory"}, CacheWish(600.0, 1)),
        ({"prompt_cache_retention": "for ever"}, None),
        ({"cache": {"retain_s": 60}}, CacheWish(60.0, 1)),
        ({"cache": {"retain_s": 60, "priority": 2, "tokens": 100}}, CacheWish(60.0, 2, 100)),
        ({"cache": {"priority": 1}}, CacheWish(300.0, 1)),
        ({"cache": {"priority": -1}}, CacheWish(0.0, -1)),
        ({"cache": {"store": False}}, CacheWish(store=False)),
        (
            {"cache": {"retain_s": 5, "tiers": ["host"]}},
            CacheWish(5.0, 1, device=False, store=False),
        ),
        (
            {"cache": {"from": 100, "tokens": 50, "priority": 2}},
            CacheWish(num_tokens=100, then=CacheWish(300.0, 2, 150)),
        ),
        ({"cache": {"from": 0, "retain_s": 5}}, CacheWish(5.0, 1)),
        (
            {
                "cache": {
                    "ranges": [
                        {"tokens": 100, "retain_s": 3600, "priority": 2},
                        {"tokens": 50, "retain_s": 60},
                        {"from": 200, "priority": -1, "store": False},
                    ]
                }
            },
            CacheWish(
                3600.0,
                2,
                100,
                then=CacheWish(
                    60.0,
                    1,
                    150,
                    then=CacheWish(num_tokens=200, then=CacheWish(0.0, -1, store=False)),
                ),
            ),
        ),
    ],
)
def test_what_the_engine_is_told(rig: Rig, fields, wish):
    assert asked(rig, **fields) == wish


@pytest.mark.parametrize(
    ("cache", "param"),
    [
        (5, "cache"),
        ({"retain_s": -1}, "cache.retain_s"),
        ({"retain_s": 1e9}, "cache.retain_s"),
        ({"retain_s": "60"}, "cache.retain_s"),
        ({"priority": 3}, "cache.priority"),
        ({"tokens": 0}, "cache.tokens"),
        ({"tokens": 10**30}, "cache.tokens"),
        ({"tiers": []}, "cache.tiers"),
        ({"tiers": ["disk"]}, "cache.tiers.0"),
        ({"tiers": ["store"], "store": False}, "cache.tiers"),
        ({"retain_s": 5, "priority": -1}, "cache.retain_s"),
        ({"from": -1}, "cache.from"),
        ({"ranges": []}, "cache.ranges"),
        ({"ranges": [{"tokens": 1}] * 17}, "cache.ranges"),
        ({"ranges": [{"tokens": 5}], "retain_s": 5}, "cache.ranges"),
        ({"ranges": [{"tokens": 5}, {"from": 4}]}, "cache.ranges.1.from"),
        ({"ranges": [{"retain_s": 5}, {"retain_s": 5}]}, "cache.ranges.0.tokens"),
        ({"ranges": [{"tokens": 5, "store": False}, {"store": True}]}, "cache.ranges.1"),
        ({"ranges": [{"tokens": 5, "tiers": ["host"]}, {"tiers": ["store"]}]}, "cache.ranges.1"),
        ({"ranges": [{"tiers": ["store"], "store": False}]}, "cache.ranges.0.tiers"),
    ],
)
def test_what_makes_no_sense(rig: Rig, cache, param):
    response = rig.chat(cache=cache)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


def test_completions_and_responses_take_it_too(rig: Rig):
    assert rig.complete(cache={"retain_s": 60}).status_code == 200
    assert rig.engine.calls[-1].cache == CacheWish(60.0, 1)
    body = {"model": MODEL, "input": "hi", "cache": {"retain_s": 60}}
    assert rig.request("POST", "/v1/responses", json=body).status_code == 200
    assert rig.engine.calls[-1].cache == CacheWish(60.0, 1)


def test_a_tenant_has_only_so_many_requests_in_flight(engine: ScriptedEngine):
    rig = Rig(engine, ServerConfig(admin_key=ADMIN_KEY, tenant_requests=2))
    engine.hold_after = 1

    async def drive() -> None:
        async with rig.client() as client:

            async def ask(salt: str | None):
                body = {"model": MODEL, "prompt": "x", "cache_salt": salt}
                return await client.post("/v1/completions", json=body)

            held = [asyncio.create_task(ask(salt)) for salt in ("a", "a", None, None, None)]
            while engine.num_requests < 5:
                await asyncio.sleep(0.001)
            refused = await ask("a")
            assert (refused.status_code, error_of(refused)["code"]) == (429, "tenant_full")
            other = asyncio.create_task(ask("b"))
            while engine.num_requests < 6:
                await asyncio.sleep(0.001)
            held[0].cancel()
            while engine.num_requests > 5:
                await asyncio.sleep(0.001)
            again = asyncio.create_task(ask("a"))
            while engine.num_requests < 6:
                await asyncio.sleep(0.001)
            for task in (*held, other, again):
                task.cancel()

    asyncio.run(drive())


def test_tenants_are_shown_to_the_administrator(engine: ScriptedEngine):
    tiers = [TierStatus("device", 1024, 100, 0, 0), TierStatus("host", 1024, 200, 0, 0)]
    engine.info = msgspec.structs.replace(engine.info, tiers=tiers)
    engine.answers[GetTenants] = Tenants([TenantStatus("a", 1, 2, 3, 4, 6, 1)], 50, 100, 0.5)
    rig = Rig(engine)
    found = rig.request("GET", "/admin/tenants").json()
    assert found["tenants"] == [
        {
            "cache_salt": "a",
            "tenant": "a",
            "running": 1,
            "waiting": 2,
            "device_bytes": 3072,
            "host_bytes": 4096,
            "store_written_bytes": 6 * 1024,
            "store_refused_bytes": 1024,
        }
    ]
    assert found["quota"] == {
        "device_bytes": 51200,
        "host_bytes": 102400,
        "store_share": 0.5,
        "requests": None,
    }


# ---- tenants by their keys -----------------------------------------------------------------------

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}


def asked_with(rig: Rig, key: str | None, **body):
    headers = {} if key is None else {"Authorization": f"Bearer {key}".encode("latin-1")}
    body = {"model": MODEL, "prompt": "x"} | body
    return rig.request("POST", "/v1/completions", json=body, headers=headers)


def test_a_tenants_key_makes_what_it_caches_its_own(engine: ScriptedEngine):
    rig = Rig(engine, ServerConfig(tenant_keys=KEYS, api_key="sk-house"))
    salts = []
    for key in ("sk-alice", "sk-bob", "sk-house"):
        for salt in (None, "alice", "s"):
            assert asked_with(rig, key, cache_salt=salt).status_code == 200
            salts.append(engine.calls[-1].salt)
    assert len(set(salts)) == 9, "no two of them share a page"
    assert [tenant_of(salt) for salt in salts[:3]] == [f"alice{TENANT_MARK}"] * 3
    assert salts[6:] == ["", "alice", "s"], "the server's own clients are as ever"


@pytest.mark.parametrize("key", [None, "", "sk-none", "alice", "sk-alice\xe9"])
def test_who_has_no_key_of_these_is_nobody(engine: ScriptedEngine, key: str | None):
    rig = Rig(engine, ServerConfig(tenant_keys=KEYS))
    response = asked_with(rig, key)
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
    assert rig.request("POST", "/tokenize", json={"prompt": "x"}).status_code == 401
    assert rig.request("GET", "/v1/models").status_code == 401


def test_a_tenants_salts_count_together(engine: ScriptedEngine):
    rig = Rig(engine, ServerConfig(tenant_keys=KEYS, tenant_requests=1))
    engine.hold_after = 1

    async def drive() -> None:
        async with rig.client() as client:

            async def ask(name: str, salt: str):
                body = {"model": MODEL, "prompt": "x", "cache_salt": salt}
                headers = {"Authorization": f"Bearer {KEYS[name]}"}
                return await client.post("/v1/completions", json=body, headers=headers)

            held = [asyncio.create_task(ask(name, "1")) for name in KEYS]
            while engine.num_requests < 2:
                await asyncio.sleep(0.001)
            refused = await ask("alice", "2")
            assert (refused.status_code, error_of(refused)["code"]) == (429, "tenant_full")
            for task in held:
                task.cancel()

    asyncio.run(drive())


def test_responses_of_another_tenant_are_not_gone_on_from(engine: ScriptedEngine):
    rig = Rig(engine, ServerConfig(tenant_keys=KEYS))

    def respond(name: str, **more: str):
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        body = {"model": MODEL, "input": "hi"} | more
        return rig.request("POST", "/v1/responses", json=body, headers=headers)

    first = respond("alice").json()["id"]
    assert respond("alice", previous_response_id=first).status_code == 200
    assert respond("bob", previous_response_id=first).status_code == 404


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "holds no keys"),
        ("alice", "a name and a key"),
        ("alice a b", "a name and a key"),
        ("alice a\nalice b", "twice"),
        ("alice a\nbob a", "twice"),
        ("x" * 65 + " a", "64 characters"),
    ],
)
def test_a_file_of_keys_that_is_none_is_told(tmp_path: Path, text: str, wrong: str):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        read_tenants(file)


def test_a_file_of_keys(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# name key\nalice  sk-alice\n\n bob sk-bob\n")
    assert read_tenants(file) == KEYS
    with pytest.raises(ConfigError, match="also api_key or admin_key"):
        ServerConfig(tenant_keys=KEYS, admin_key="sk-bob")
