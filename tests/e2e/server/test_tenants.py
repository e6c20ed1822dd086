"""Tenants by their keys, against a real server: what one has cached another does not find, and the
administrator sees who has what."""

import httpx

from e2e.server.harness import API_KEY, MODEL, TIMEOUT_S, running

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
PROMPT = " ".join(f"word{i}" for i in range(60))


def cached(url: str, key: str, **more: str) -> int:
    """Tokens of the prompt that were found."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "temperature": 0} | more
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_a_tenant_caches_is_its_own():
    with running({"tenant_share": 50}, {"tenant_keys": KEYS, "api_key": "sk-house"}) as server:
        keys = [*KEYS.values(), "sk-house"]
        assert [cached(server.url, key) for key in keys] == [0, 0, 0]
        assert all(cached(server.url, key) > 0 for key in keys)
        assert cached(server.url, "sk-house", cache_salt="alice") == 0
        assert cached(server.url, "sk-alice", cache_salt="user-1") == 0
        with httpx.Client(headers={"Authorization": f"Bearer {API_KEY}"}) as admin:
            found = admin.get(f"{server.url}/admin/tenants").json()
        # Who has the salt "alice" and no key of its own is another one.
        by_key = [each for each in found["tenants"] if each["cache_salt"] in (None, "")]
        held = {each["tenant"]: each["device_bytes"] for each in by_key}
        assert held.keys() >= {"alice", "bob", ""}
        assert held["alice"] > held["bob"] > 0, "two salts are one tenant's"
        assert 0 < found["quota"]["device_bytes"] < 128 << 20
