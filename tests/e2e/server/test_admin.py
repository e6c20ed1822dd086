"""/admin, /metrics and the cache behind them, on the real server."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.server.harness import MODEL
from e2e.serving.server import is_moving, wait_until

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


def complete(http, prompt, **options):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0} | options
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def tiers(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def flush(http, *names):
    response = http.post("/admin/cache/flush", json={"tiers": list(names)})
    assert response.status_code == 200, response.text


def wait_idle(http):
    wait_until(lambda: not is_moving(http.get("/admin/cache").json()), "no page is being moved")


def test_a_prompt_comes_back_from_each_tier_with_the_same_answer(http):
    prompt = "From each tier. " + PROMPT
    first = complete(http, prompt)
    assert sum(tiers(first).values()) == 0
    second = complete(http, prompt)
    assert tiers(second)["device"] > 64
    wait_idle(http)
    flush(http, "device")
    third = complete(http, prompt)
    assert tiers(third)["host"] > 64
    wait_idle(http)
    flush(http, "device", "host")
    fourth = complete(http, prompt)
    assert tiers(fourth)["store"] > 64
    texts = {answer["choices"][0]["text"] for answer in (first, second, third, fourth)}
    assert len(texts) == 1


def test_a_prefetch_warms_the_host(http):
    prompt = "Prefetched. " + PROMPT
    complete(http, prompt)
    wait_idle(http)
    flush(http, "device", "host")
    response = http.post("/admin/cache/prefetch", json={"prompt": prompt})
    assert response.status_code == 200, response.text
    assert response.json()["cached_tokens"] > 64
    assert tiers(complete(http, prompt))["host"] > 64


def test_the_cache_holds_its_invariants(http):
    assert http.get("/admin/cache?check=true").json()["checked"] is True


def test_the_store_can_be_changed(http):
    url = http.get("/admin/store").json()["url"]
    assert url.startswith("file://")
    assert http.delete("/admin/store").json()["state"] == "detached"
    assert http.put("/admin/store", json={"url": "memory://"}).json()["state"] == "attached"
    bad = http.put("/admin/store", json={"url": "nosuch://u:secret@h"})
    assert bad.status_code in (400, 409)
    assert "secret" not in bad.text
    again = http.put("/admin/store", json={"url": url})
    assert again.status_code == 200, again.text
    assert again.json()["state"] == "attached"


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer other"])
def test_the_admin_needs_the_key_from_this_machine_too_c49(http, key):
    assert http.get("/admin/cache", headers={"Authorization": key}).status_code == 401


def test_metrics_follow_what_happens(http):
    complete(http, "Counted. " + PROMPT)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }
    assert found["quire_engine_up",] == 1
    assert found["quire_requests_total", "/v1/completions", "200"] >= 1
    assert found["quire_prompt_tokens_total",] > 64
    assert found["quire_generated_tokens_total",] >= 4
    assert found["quire_tier_pages", "full", "device"] > 0
    assert found["quire_time_to_first_token_seconds_count",] >= 1
