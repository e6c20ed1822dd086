"""The dashboard and the alert rules ask for metrics, labels and values of labels that there are."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from quire.engine.counters import SchedulerCounters
from quire.engine.messages import CachedTokens
from quire.manager.counters import Counters
from quire.manager.operations import OperationKind
from quire.router.metrics import ROUTER_METRICS
from quire.server.metrics import METRICS
from quire.server.notices import WELL
from quire.types import PageStatus
from quire.web.metrics import COUNTER, HISTOGRAM

yaml = pytest.importorskip("yaml")
FOLDER = Path(__file__).parents[2] / "deploy/grafana"
SPECS = {spec.name: spec for spec in (*METRICS, *ROUTER_METRICS)}
OURS = {"job", "le", "instance"}
VALUES = {
    ("quire_engine_events_total", "event"): {
        *SchedulerCounters().snapshot(),
        *(field.name for field in fields(Counters)),
    },
    ("quire_cached_tokens_total", "tier"): {*CachedTokens.__struct_fields__},
    ("quire_faults_total", "operation"): {"audit", *OperationKind},
    ("quire_faults_total", "status"): {status.name.lower() for status in PageStatus},
    # Of the store's client: by kind, whatever the rest.
    ("quire_store_events_total", "event"): {"read:.*", "written:.*", "error:.*", "declined:.*"},
}
"""What a label may be, where something asks for a value of it."""


def asked(expression: str) -> None:
    """Every metric of an expression exists, with the labels that it is asked for by."""
    names = re.findall(r"\bquire_\w+", expression)
    assert names, expression
    for name in names:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        spec = SPECS.get(name) or SPECS.get(base)
        assert spec is not None, name
        if name != spec.name:
            assert spec.kind is HISTOGRAM, name
    for name, selector in re.findall(r"(quire_\w+)\{([^}]*)\}", expression):
        spec = SPECS.get(name) or SPECS[re.sub(r"_(bucket|sum|count)$", "", name)]
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= {*spec.labels, *OURS}, expression
        for label, _, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
            if label != "job":
                assert {*value.split("|")} <= {*VALUES[name, label]}, expression
    counters = [n for n in names if n in SPECS and SPECS[n].kind is COUNTER]
    if counters:
        assert re.search(r"\b(rate|increase)\(", expression), expression
    known = {label for name in names for spec in [SPECS.get(name)] if spec for label in spec.labels}
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        assert {each.strip() for each in grouped.split(",")} <= known | OURS, expression


def test_every_panel_asks_for_what_there_is():
    board = json.loads((FOLDER / "quire.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(targets) > 20
    for expression in targets:
        asked(expression)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_what_the_log_calls_no_failure_alarms_nobody():
    """Pages that were gone, or not needed any more: both come and go in good service."""
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == "QuireFaults"]
    left_out = re.search(r'status!~"([^"]*)"', rule["expr"])[1].split("|")
    assert {"ok", *left_out} == set(WELL)


def test_every_alert_asks_for_what_there_is():
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        asked(rule["expr"])
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        metric = re.search(r"quire_\w+", rule["expr"])[0]
        assert named <= set(SPECS[metric].labels)
    assert len({rule["alert"] for rule in rules}) == len(rules)


@pytest.mark.parametrize(
    "wrong",
    [
        'rate(quire_engine_events_total{event="audited_page"}[5m])',
        'rate(quire_cached_tokens_total{tier!="store_lost"}[5m])',
        'rate(quire_faults_total{operation="audits"}[5m])',
        'rate(quire_faults_total{status!~"miss|canceled"}[5m])',
        'rate(quire_store_events_total{event=~"reads:.*"}[5m])',
    ],
)
def test_a_value_that_no_label_has_is_noticed(wrong):
    with pytest.raises(AssertionError):
        asked(wrong)
