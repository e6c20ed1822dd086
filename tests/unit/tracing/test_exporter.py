"""Spans reach a collector, or are counted as lost; and nobody waits for either."""

from collections import Counter

import pytest

from collector import collecting, wait_until
from ports import free_port
from quire.errors import ConfigError
from quire.tracing.collector import endpoint
from quire.tracing.exporter import MAX_BATCH, Exporter
from quire.tracing.spans import Span, SpanKind, TraceContext

SOON_S = 0.01


def span(name: str = "work") -> Span:
    return Span(
        context=TraceContext.new(),
        parent="",
        name=name,
        kind=SpanKind.INTERNAL,
        began_ns=1,
        ended_ns=2,
        attributes={},
    )


class Counted(Counter):
    def __call__(self, outcome: str, number: int) -> None:
        self[outcome] += number


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otel/v1/traces", "https://c/otel/v1/traces"),
    ],
)
def test_the_address_of_a_collector_is_enough(url, whole):
    assert endpoint(url) == whole


@pytest.mark.parametrize(
    "url", ["c:4318", "grpc://c:4317", "http://", "http://me:pw@c", "http://c:x"]
)
def test_what_is_no_address_is_said(url):
    with pytest.raises(ConfigError, match="http://host:4318"):
        endpoint(url)


def test_all_spans_come_with_where_they_are_from():
    counted = Counted()
    with collecting() as collector:
        exporter = Exporter(collector.url, {"service.name": "quire"}, counted, every_s=SOON_S)
        for _ in range(MAX_BATCH + 1):
            exporter.add(span())
        exporter.close()
    assert len(collector.spans) == MAX_BATCH + 1
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.spans[0].resource == {"service.name": "quire"}
    assert counted["exported"] == MAX_BATCH + 1
    assert not counted["dropped"] + counted["refused"]


def test_what_a_collector_missed_it_gets_when_it_is_back(caplog):
    counted, port = Counted(), free_port()
    exporter = Exporter(f"http://127.0.0.1:{port}", {}, counted, every_s=SOON_S)
    exporter.add(span("early"))
    wait_until(lambda: caplog.records, "the trouble is said")
    with collecting(port) as collector:
        collector.named("early")
        exporter.add(span("late"))
        collector.named("late")
        wait_until(lambda: counted["exported"] == 2, "both are counted")
    exporter.close()
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == 1  # once, however often it was tried


def test_a_collector_that_is_gone_costs_spans_and_no_more_memory():
    counted = Counted()
    exporter = Exporter(f"http://127.0.0.1:{free_port()}", {}, counted, every_s=60, max_waiting=10)
    for _ in range(25):
        exporter.add(span())
    assert counted["dropped"] == 15
    exporter.close()
    assert counted["dropped"] == 25
    assert not counted["exported"]


@pytest.mark.parametrize(
    ("answer", "exported", "refused"),
    [
        ((400, {}), 0, 3),
        ((200, {"partialSuccess": {"rejectedSpans": "2", "errorMessage": "too old"}}), 1, 2),
        ((200, []), 3, 0),
    ],
)
def test_what_a_collector_refuses_is_counted_and_not_sent_again(answer, exported, refused):
    counted = Counted()
    with collecting() as collector:
        collector.answer = answer
        exporter = Exporter(collector.url, {}, counted, every_s=60)
        for _ in range(3):
            exporter.add(span())
        exporter.close()
    assert (counted["exported"], counted["refused"]) == (exported, refused)
    assert not counted["dropped"]


def test_a_busy_collector_is_asked_again():
    counted = Counted()
    with collecting() as collector:
        collector.answer = (503, {})
        exporter = Exporter(collector.url, {}, counted, every_s=SOON_S)
        exporter.add(span())
        wait_until(lambda: not exporter.is_well, "it was told to wait")
        collector.answer = (200, {})
        collector.named("work")
        exporter.close()
    assert counted["exported"] == 1
