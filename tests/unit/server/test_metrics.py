"""The one table of metrics, the exposition, and that they agree."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.messages import CountedTime, DraftStatus, GetStatus, Handed, HandoverStatus
from quire.server.metrics import LOAD_METRICS, METRICS, Metrics
from quire.web.guards import endpoint_of
from quire.web.metrics import COUNTER, reference
from unit.server.scripted import MODEL, Rig, ScriptedEngine, status

COUNTERS = {
    "matched_device_pages": 1,
    "evicted_spare_pages": 2,
    "loaded_pages": 3,
    "backed_up_pages": 4,
    "prefetch_declined:host_full": 5,
    "prefetch_fetched:truncated": 6,
    "fetch:timeout": 7,
    "steps": 8,
}


STAGES = ("looked", "moved", "gave")
HANDOVER = HandoverStatus(
    open=1,
    sent_pages=2,
    sent_bytes=3,
    received_pages=4,
    received_bytes=5,
    transfers=CountedTime(6, 0.5),
    restores={"ready": CountedTime(7, 1.5)},
    promised_pages=8,
    restored_pages=9,
    repairs={"evicted": 10},
    local={"timeout": 11},
    links={"tcp://a:1": "up"},
    transports={"tcp://a:1": "shm"},
    received_by={"shm": 5},
)


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families(text).values()
        for sample in family.samples
    }


@pytest.fixture
def exposed():
    """Everything there is, after one request of each kind."""
    engine = ScriptedEngine()
    engine.answers[GetStatus] = status(
        counters=COUNTERS, handover=HANDOVER, drafts=DraftStatus([3, 2], [2, 1], 3)
    )
    rig = Rig(engine)
    rig.chat()
    rig.chat(n=0)
    rig.service.metrics.aborts.labels("disconnect").inc()
    rig.service.metrics.turned_away.labels("engine").inc()
    return rig.request("GET", "/metrics").text


def test_every_metric_of_the_table_is_exposed_with_its_type_and_help(exposed):
    found = families(exposed)
    for spec in METRICS:
        family = found[spec.name.removesuffix("_total") if spec.kind is COUNTER else spec.name]
        assert family.type == spec.kind
        assert family.documentation == spec.help
        assert family.samples


def test_nothing_is_exposed_that_is_not_in_the_table(exposed):
    names = {spec.name.removesuffix("_total") for spec in METRICS}
    assert {name.removesuffix("_total") for name in families(exposed)} <= names
    assert "_created" not in exposed


def test_names_begin_with_quire_and_are_unique():
    """But those that others gave them."""
    names = [spec.name for spec in METRICS]
    assert all(spec.name.startswith("quire_") for spec in METRICS if spec not in LOAD_METRICS)
    assert len(set(names)) == len(names)
    assert all((spec.kind is COUNTER) == spec.name.endswith("_total") for spec in METRICS)


def test_requests_are_counted_by_endpoint_and_status(exposed):
    found = samples(exposed)
    assert found["quire_requests_total", "/v1/chat/completions", "200"] == 1
    assert found["quire_requests_total", "/v1/chat/completions", "400"] == 1
    assert found[("quire_requests_in_flight",)] == 1  # the scrape itself
    assert found[("quire_generated_tokens_total",)] == 7
    assert found[("quire_prompt_tokens_total",)] == 21
    assert found["quire_cached_tokens_total", "store"] == 4
    assert found[("quire_time_to_first_token_seconds_count",)] == 1
    assert found[("quire_time_per_output_token_seconds_count",)] == 1


def test_routers_of_vllm_servers_read_how_busy_it_is_by_the_names_they_know(exposed):
    """What is cached and used by nobody is room."""
    found = samples(exposed)
    assert found["vllm:num_requests_running", MODEL] == found[("quire_running_requests",)] == 1
    assert found["vllm:num_requests_waiting", MODEL] == found[("quire_waiting_requests",)] == 2
    assert found["vllm:kv_cache_usage_perc", MODEL] == 10 / 100
    assert found["vllm:cache_config_info", "16", MODEL, "100"] == 1


def test_the_engines_figures_have_their_own_metrics(exposed):
    found = samples(exposed)
    assert found["quire_matched_pages_total", "device"] == 1
    assert found["quire_evicted_pages_total", "host_spare"] == 2
    assert found["quire_moved_pages_total", "load"] == 3
    assert found["quire_moved_bytes_total", "backup"] == 4 * 1024
    assert found["quire_prefetch_declined_total", "host_full"] == 5
    assert found["quire_prefetch_fetched_total", "truncated"] == 6
    assert found["quire_faults_total", "fetch", "timeout"] == 7
    assert found["quire_engine_events_total", "steps"] == 8
    assert found["quire_tier_used_bytes", "full", "host"] == 50 * 1024
    assert found["quire_engine_seconds_total", "model"] == 1.5
    assert found[("quire_store_attached",)] == 1
    assert found[("quire_store_answers", "0")] == 0
    assert found[("quire_store_read_seconds_per_page", "0")] == 0.00025
    assert found[("quire_store_bytes", "0", "used")] == 1 << 20
    assert found[("quire_store_bytes", "0", "max")] == 4 << 20


def test_what_goes_between_engines_has_its_metrics(exposed):
    found = samples(exposed)
    assert found[("quire_handovers_open",)] == 1
    assert found["quire_handover_pages_total", "sent"] == 2
    assert found["quire_handover_bytes_total", "sent"] == 3
    assert found["quire_handover_pages_total", "received"] == 4
    assert found["quire_handover_bytes_total", "received"] == 5
    assert found[("quire_handovers_total",)] == 6
    assert found[("quire_handover_seconds_total",)] == 0.5
    assert found["quire_restores_total", "ready"] == 7
    assert found["quire_restore_seconds_total", "ready"] == 1.5
    assert found[("quire_promised_pages_total",)] == 8
    assert found[("quire_restored_pages_total",)] == 9
    assert found["quire_handover_repairs_total", "evicted"] == 10
    assert found["quire_handovers_local_total", "timeout"] == 11
    assert found["quire_peer_link", "tcp://a:1", "up"] == 1
    assert found["quire_peer_transport", "tcp://a:1", "shm"] == 1
    assert found["quire_peer_received_bytes_total", "shm"] == 5
    assert found["quire_cached_tokens_total", "prefill_host"] == 0


def test_without_an_answer_the_last_known_figures_are_exposed():
    engine = ScriptedEngine()
    rig = Rig(engine)
    found = samples(rig.request("GET", "/metrics").text)
    assert found[("quire_engine_up",)] == 1
    assert ("quire_running_requests",) not in found
    engine.status = status(running=9)
    engine.failure = "the engine is gone"
    found = samples(rig.request("GET", "/metrics").text)
    assert found[("quire_engine_up",)] == 0
    assert found[("quire_running_requests",)] == 9


def test_unknown_paths_are_one_label():
    rig = Rig()
    for path in ("/a", "/b", "/v1/models/x/y", "/v1/models/z"):
        rig.request("GET", path)
    found = samples(rig.request("GET", "/metrics").text)
    assert found["quire_requests_total", "other", "404"] == 2
    assert found["quire_requests_total", "/v1/models/{model}", "404"] == 2


def test_every_endpoint_is_a_label_of_its_own():
    paths = Rig().app.openapi()["paths"]
    assert [endpoint_of(path) for path in paths] == [*paths]


def test_stages_of_hand_overs_are_told_apart():
    """Of one that never came so far as to move, all was looking."""
    metrics = Metrics()
    for about, is_giver in (({"moving_s": 1.25}, False), ({}, False), ({}, True)):
        metrics.handed_over(Handed("", is_giver, 10.0, 12.0, about))
    found = samples(metrics.exposition(None, is_up=True).decode())
    stages = {stage: found["quire_handover_stage_seconds_sum", stage] for stage in STAGES}
    assert stages == {"looked": 0.75 + 2.0, "moved": 1.25, "gave": 2.0}
    assert found["quire_handover_stage_seconds_count", "looked"] == 2


def test_servers_do_not_share_figures():
    one, other = Metrics(), Metrics()
    one.prompt_tokens.inc(5)
    assert samples(other.exposition(None, is_up=True).decode())["quire_prompt_tokens_total",] == 0


def test_the_reference_has_a_row_for_each():
    rows = reference(METRICS).splitlines()
    assert len(rows) == len(METRICS) + 2
    assert all(row.count("|") == 5 for row in rows)
